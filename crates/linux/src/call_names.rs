//! Names of the system calls of the processor, by number.

#[cfg_attr(target_arch = "aarch64", path = "call_names/aarch64.rs")]
#[cfg_attr(not(target_arch = "aarch64"), path = "call_names/x86_64.rs")]
mod first;

use first::FIRST;

/// The number of the first call after a gap, and the calls from there on.
const SECOND_START: usize = 424;
const SECOND: [&str; 46] = [
    "pidfd_send_signal",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "open_tree",
    "move_mount",
    "fsopen",
    "fsconfig",
    "fsmount",
    "fspick",
    "pidfd_open",
    "clone3",
    "close_range",
    "openat2",
    "pidfd_getfd",
    "faccessat2",
    "process_madvise",
    "epoll_pwait2",
    "mount_setattr",
    "quotactl_fd",
    "landlock_create_ruleset",
    "landlock_add_rule",
    "landlock_restrict_self",
    "memfd_secret",
    "process_mrelease",
    "futex_waitv",
    "set_mempolicy_home_node",
    "cachestat",
    "fchmodat2",
    "map_shadow_stack",
    "futex_wake",
    "futex_wait",
    "futex_requeue",
    "statmount",
    "listmount",
    "lsm_get_self_attr",
    "lsm_set_self_attr",
    "lsm_list_modules",
    "mseal",
    "setxattrat",
    "getxattrat",
    "listxattrat",
    "removexattrat",
    "open_tree_attr",
    "file_getattr",
    "file_setattr",
];

/// The name of a system call; `None` if the number is unknown.
#[must_use]
pub fn call_name(number: i64) -> Option<&'static str> {
    let number = usize::try_from(number).ok()?;
    match number.checked_sub(SECOND_START) {
        Some(behind) => SECOND.get(behind).copied(),
        None => FIRST.get(number).copied().filter(|name| !name.is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_c_library() {
        for (number, name) in [
            (libc::SYS_read, "read"),
            (libc::SYS_openat, "openat"),
            (libc::SYS_newfstatat, "newfstatat"),
            (libc::SYS_rt_sigreturn, "rt_sigreturn"),
            (libc::SYS_clone, "clone"),
            (libc::SYS_mmap, "mmap"),
            (libc::SYS_statx, "statx"),
            (libc::SYS_pidfd_send_signal, "pidfd_send_signal"),
            (libc::SYS_clone3, "clone3"),
            (452, "fchmodat2"),
            (462, "mseal"),
            (469, "file_setattr"),
        ] {
            assert_eq!(call_name(number), Some(name), "{number}");
        }
        assert_eq!((call_name(400), call_name(1 << 32), call_name(-1)), (None, None, None));
    }
}
