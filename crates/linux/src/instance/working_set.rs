//! Records the pages of the first run of a process for later processes of its state.

use super::Instance;
use crate::sentry::FIRST;

impl Instance {
    /// Adds the pages of the first run of its process to the working set of the state that it
    /// stands on, if that state is still to learn. A set would show later guests which pages a run
    /// has touched, so none is recorded where each call has its own process.
    pub(super) fn record_working_set(&self) {
        let (first, origin) = (self.standing.ground(FIRST), &self.standing.rest.origin);
        let Some((first, live)) = first.zip(self.live.as_ref()) else { return };
        if self.limits.replaced || !origin.records_runs() {
            return;
        }
        let body = &live.guest.body;
        // A run that is not recorded costs later processes their page faults.
        if let Ok(Some(run)) = body.process.touched(&first.part.segments, &body.disturbed) {
            origin.record(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::WarmError;
    use crate::platform::PlatformError;
    use crate::ranges::Ranges;
    use crate::{Program, Warm};
    use afresh_sys::{PAGE_SIZE, pagemap};

    fn cat(is_replaced: bool) -> Option<Warm> {
        match Program::new("/bin/cat").replace_processes(is_replaced).warm() {
            Ok(warm) => Some(warm),
            Err(WarmError::Platform(error @ PlatformError::Missing { .. })) => {
                println!("SKIPPED: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Whether the kernel lists private pages, so that runs can be recorded.
    fn lists_own_pages() -> bool {
        let map = std::fs::File::open("/proc/self/pagemap").unwrap();
        match pagemap::own_pages(&map, 0..PAGE_SIZE as u64, |_| {}) {
            Err(error) if error.errno == libc::ENOTTY => {
                println!("SKIPPED: this kernel does not list private pages");
                false
            }
            listed => listed.is_ok(),
        }
    }

    /// Private pages of the process of an instance that was not called yet.
    fn own_pages(instance: &mut Instance) -> Ranges {
        instance.prepare().unwrap();
        let first = instance.standing.ground(FIRST).unwrap();
        let process = &instance.live.as_ref().unwrap().guest.body.process;
        let mut own = Ranges::default();
        for segment in first.part.segments.iter() {
            process.private(segment.range()).unwrap().into_iter().for_each(|run| own.insert(run));
        }
        own
    }

    #[test]
    fn processes_have_the_pages_that_earlier_runs_of_their_state_wrote() {
        let Some(warm) = cat(false).filter(|_| lists_own_pages()) else { return };
        assert!(own_pages(&mut warm.instance()).is_empty());
        let mut kept = Vec::new();
        for _ in 0..12 {
            let mut instance = warm.instance();
            assert_eq!(instance.call(b"one\n").unwrap(), b"one\n");
            kept.push(instance);
        }
        let copied = warm.standing.rest.origin.copied();
        assert!(!copied.is_empty());
        let mut instance = warm.instance();
        let own = own_pages(&mut instance);
        for range in copied {
            assert_eq!(own.within(range.clone()), [range]);
        }
        for round in 0..3 {
            assert_eq!(instance.call(b"two\n").unwrap(), b"two\n", "round {round}");
            instance.verify().unwrap();
            assert_eq!(instance.call_pristine(b"three\n").unwrap(), b"three\n");
            instance.checkpoint().unwrap();
        }
        for mut instance in kept {
            instance.verify().unwrap();
        }
        // The set is not for an instance whose processes are replaced.
        let mut replaced = warm.instance();
        replaced.limits.replaced = true;
        assert!(own_pages(&mut replaced).is_empty());
    }

    #[test]
    fn processes_that_are_replaced_show_no_pages_of_earlier_runs() {
        let Some(warm) = cat(true).filter(|_| lists_own_pages()) else { return };
        let mut repeated = warm.instance();
        for _ in 0..12 {
            assert_eq!(warm.instance().call(b"one\n").unwrap(), b"one\n");
            assert_eq!(repeated.call_pristine(b"two\n").unwrap(), b"two\n");
        }
        assert_eq!(repeated.stats().processes, 12);
        repeated.reset();
        for mut instance in [repeated, warm.instance()] {
            assert!(own_pages(&mut instance).is_empty());
        }
        assert!(warm.standing.rest.origin.copied().is_empty());
    }
}
