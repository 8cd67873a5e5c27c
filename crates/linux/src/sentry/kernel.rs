//! Kernel objects: plain data that is cloned with a frozen guest and compared when a reset is
//! verified.

pub(super) mod channels;
pub(super) mod cpu_time;
mod credentials;
pub(super) mod device;
pub(super) mod epoll;
pub(super) mod epoll_set;
pub(super) mod fd_table;
pub(super) mod fifos;
pub(super) mod file_locks;
pub(super) mod generation;
pub(super) mod identity;
pub(super) mod in_flight_fds;
pub(super) mod inotify;
pub(super) mod message_queues;
pub(super) mod open_fifo;
pub(super) mod packed_kernel;
pub(super) mod poll_events;
pub(super) mod posix_queues;
pub(super) mod prctl_state;
pub(super) mod process;
pub(super) mod process_info;
pub(super) mod process_table;
pub(super) mod process_tunables;
pub(super) mod readiness;
pub(super) mod resource_limits;
pub(super) mod semaphores;
pub(super) mod signals;
pub(super) mod soundness;
pub(super) mod streams;
pub(super) mod threads;
pub(super) mod time;
pub(super) mod timer_fd;
pub(super) mod timers;
pub(super) mod user_namespaces;
pub(super) mod wait_options;
