//! Descriptors that messages carry between processes.

use rustix::io::Errno;

use super::{Description, Descriptor, FdTable};
use crate::sentry::kernel::in_flight_fds::InFlightFds;

impl FdTable {
    /// Descriptors in flight between processes.
    pub(in crate::sentry) fn carried(&self) -> &InFlightFds {
        &self.carried
    }

    /// Sends descriptors of the current process on their way.
    pub(in crate::sentry) fn carry(&mut self, descriptors: &[u64]) -> Result<u64, Errno> {
        let descriptions = descriptors.iter().map(|descriptor| self.id(*descriptor));
        let descriptions = descriptions.collect::<Result<Vec<_>, _>>()?;
        let parcel = self.carried.add(descriptions.clone())?;
        descriptions.into_iter().for_each(|id| self.hold(id));
        Ok(parcel)
    }

    /// Descriptors for received descriptions, at most `room`, the objects that were closed, and
    /// whether any was dropped.
    pub(in crate::sentry) fn unpack(
        &mut self,
        parcel: u64,
        most: usize,
        close_on_exec: bool,
    ) -> (Vec<u32>, Vec<Description>, bool) {
        let list = self.carried.take(parcel);
        let mut numbers = Vec::new();
        for description in list.iter().take(most) {
            let Ok(number) = self.free(0) else { break };
            self.descriptors
                .insert(number, Descriptor { description: *description, close_on_exec });
            self.hold(*description);
            numbers.push(number);
        }
        let cut = numbers.len() < list.len();
        (numbers, self.unused(list), cut)
    }

    /// Descriptors for the descriptions of a message that stays (`MSG_PEEK`), at most `most`, and
    /// whether any was left out.
    pub(in crate::sentry) fn peek_parcel(
        &mut self,
        parcel: u64,
        most: usize,
        close_on_exec: bool,
    ) -> (Vec<u32>, bool) {
        let list = self.carried.get(parcel).to_vec();
        let mut numbers = Vec::new();
        for description in list.iter().take(most) {
            let Ok(number) = self.free(0) else { break };
            let descriptor = Descriptor { description: *description, close_on_exec };
            self.descriptors.insert(number, descriptor);
            self.hold(*description);
            numbers.push(number);
        }
        let cut = numbers.len() < list.len();
        (numbers, cut)
    }

    /// A further descriptor of the current process for an open description, closed on `exec`.
    pub(in crate::sentry) fn describe(&mut self, description: u64) -> Result<u32, Errno> {
        let number = self.free(0)?;
        self.descriptors.insert(number, Descriptor { description, close_on_exec: true });
        self.hold(description);
        Ok(number)
    }

    /// Drops a message in flight, and returns the objects that it closed.
    pub(in crate::sentry) fn drop_parcel(&mut self, parcel: u64) -> Vec<Description> {
        let list = self.carried.take(parcel);
        self.unused(list)
    }
}
