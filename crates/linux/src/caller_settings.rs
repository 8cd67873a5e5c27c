//! Settings that a program started by hand inherits from the process that starts it: the file mode
//! mask, and signals that are ignored.

use crate::sentry::Kernel;

/// The mask of a process that has set none.
const USUAL_UMASK: u32 = 0o022;

/// Settings of a process that a program inherits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallerSettings {
    umask: u32,
    /// A bit for each signal.
    ignored: u64,
}

impl Default for CallerSettings {
    fn default() -> Self {
        Self { umask: USUAL_UMASK, ignored: 0 }
    }
}

impl CallerSettings {
    /// The settings of this process, or defaults if the host does not report them. SIGPIPE counts
    /// as not ignored, because the runtime of Rust ignores it at the start of a program.
    #[must_use]
    pub fn of_this_process() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        Self::of_status(&status)
    }

    fn of_status(status: &str) -> Self {
        let value = |name: &str, radix: u32| {
            let text = status.lines().find_map(|line| line.strip_prefix(name))?;
            u64::from_str_radix(text.trim(), radix).ok()
        };
        let umask = value("Umask:", 8).map_or(USUAL_UMASK, |mask| mask as u32 & 0o777);
        let pipe = 1 << (libc::SIGPIPE - 1);
        Self { umask, ignored: value("SigIgn:", 16).unwrap_or_default() & !pipe }
    }

    /// Whether `signal` is ignored.
    fn ignores(&self, signal: i32) -> bool {
        (1..=64).contains(&signal) && self.ignored >> (signal - 1) & 1 != 0
    }

    /// Gives the first process of a guest these settings.
    pub(crate) fn apply(&self, state: &mut Kernel) {
        let signals = (1..=64).filter(|signal| self.ignores(*signal)).map(|signal| signal as u64);
        state.inherit(self.umask, signals);
    }
}

#[cfg(test)]
mod tests {
    use afresh_files::{Budget, Tree};

    use super::*;
    use crate::sentry::Layout;

    #[test]
    fn settings_are_those_of_the_status_file() {
        let settings = CallerSettings::of_status(
            "Name:\tafresh\nUmask:\t0077\nSigBlk:\t0000000000000008\nSigIgn:\t0000000000001003\n",
        );
        assert_eq!(settings, CallerSettings { umask: 0o077, ignored: 3 });
        assert!(settings.ignores(libc::SIGHUP) && settings.ignores(libc::SIGINT));
        assert!(!settings.ignores(libc::SIGPIPE) && !settings.ignores(0) && !settings.ignores(65));
        assert_eq!(CallerSettings::of_status(""), CallerSettings::default());
    }

    #[test]
    fn a_program_begins_with_the_settings() {
        let tree = Tree::new(Budget::default());
        let mut state = Kernel::new(Layout::new(1 << 20), tree, None, Vec::new());
        let killed = 1 << (libc::SIGKILL - 1);
        CallerSettings { umask: 0o027, ignored: 1 | killed }.apply(&mut state);
        assert_eq!(state.inherited(), (0o027, 1));
    }
}
