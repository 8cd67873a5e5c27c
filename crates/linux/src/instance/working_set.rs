//! Records the pages of the first run of a process for later processes of its state.

use super::Instance;
use crate::sentry::FIRST;

impl Instance {
    /// Adds the pages of the first run of its process to the working set of the state that it
    /// stands on, if that state is still to learn.
    pub(super) fn record_working_set(&self) {
        let (first, origin) = (self.standing.ground(FIRST), &self.standing.rest.origin);
        let Some((first, live)) = first.zip(self.live.as_ref()) else { return };
        if !origin.records_runs() {
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

    fn cat() -> Option<Warm> {
        match Program::new("/bin/cat").warm() {
            Ok(warm) => Some(warm),
            Err(WarmError::Platform(error @ PlatformError::Missing { .. })) => {
                println!("SKIPPED: {error}");
                None
            }
            Err(error) => panic!("{error}"),
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
        let Some(warm) = cat() else { return };
        assert!(own_pages(&mut warm.instance()).is_empty());
        let mut kept = Vec::new();
        for _ in 0..12 {
            let mut instance = warm.instance();
            assert_eq!(instance.call(b"one\n").unwrap(), b"one\n");
            kept.push(instance);
        }
        let copied = warm.standing.rest.origin.copied();
        if copied.is_empty() {
            return println!("SKIPPED: this kernel does not list private pages");
        }
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
    }
}
