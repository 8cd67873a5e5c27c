//! The sum of the maxima of all lists that a guest sizes: the memory that the sentry may keep for
//! one guest. Other limits bound its memory and files.
//! `docs/decisions/bounded-sentry.md` lists them.

use super::kernel::channels::capacities::{MAX_EXTRA_BYTES, MAX_USUAL_BYTES};
use super::kernel::channels::{
    CAPACITY, CHANNELS, Channel, Datagram, InFlightMessage, LETTERS, MAX_MESSAGES, PAGE,
};
use super::kernel::epoll::MAX_INTERESTS;
use super::kernel::fd_table::{Description, MAX_ALL_DESCRIPTORS, MAX_DESCRIPTIONS};
use super::kernel::file_locks::{FileLock, LOCKS};
use super::kernel::in_flight_fds::CARRIED;
use super::kernel::inotify::{InotifyEvent, InotifyWatch, MAX_INSTANCES, QUEUED, WATCHES};
use super::kernel::message_queues::{self, MAX_BYTES};
use super::kernel::posix_queues::{self, MAX_COUNT, MAX_SIZE};
use super::kernel::process::Process;
use super::kernel::process_info::MAX_ARGUMENT_BYTES;
use super::kernel::process_table::PROCESSES;
use super::kernel::resource_limits::MAX_TASKS;
use super::kernel::semaphores::{
    MAX_ADJUSTMENTS, MAX_SEMAPHORES, MAX_SETS, Semaphore, SemaphoreOperation, SemaphoreSet,
};
use super::kernel::signals::{PENDING, SignalInfo};
use super::kernel::threads::{MAX_WAITED, Thread, WAITED_UNCHECKED};
use super::kernel::timers::TIMERS;
use super::kernel::user_namespaces::MAX_NAMESPACES;
use super::kernel::users::MAX_GROUPS;
use super::mm::layout::Mapping;
use super::mm::layout::limits::MAX_ALL_MAPPINGS;
use super::mm::shared_segments::MAX_SEGMENTS;
use super::name_lengths::{NAME, PATH_LEN};
use super::net::closed_connections::MAX_ADDRESSES;
use super::net::datagrams::MAX_CORKED_BYTES;
use super::net::dns::NAMES;
use super::net::socket_options::{MAX_OPTION_SIZE, OPTIONS};
use super::tty::terminals::{MAX_UNREAD_OUTPUT, TERMINALS, TYPED, Terminal};
use super::unserved::MAX_UNSERVED;

/// Bytes of a signal frame with the processor's state, at most: AMX takes 8 KiB of them.
const CONTEXT: usize = 12 << 10;
/// Bytes of a key and a block, or of a small row of a table, at most.
const ROW: usize = 128;
/// The bytes of a map that has just split its nodes, for each that it holds; or of a vector that
/// has just grown.
const GROWTH: usize = 3;

/// Lists, their maximum items, and the bytes of each.
fn maxima() -> Vec<(&'static str, usize, usize)> {
    let size_of_map = |item: usize| GROWTH * (item + 16);
    let context = size_of_map(size_of::<Thread>()) + CONTEXT + PENDING * size_of::<SignalInfo>();
    let process = size_of_map(size_of::<Process>())
        + 64 * size_of_map(32)
        + TIMERS as usize * size_of_map(ROW)
        + PENDING * size_of::<SignalInfo>();
    // A channel of a page has fewer datagrams.
    let usual = (MAX_USUAL_BYTES + MAX_EXTRA_BYTES) / CAPACITY;
    let datagrams = usual * LETTERS + CHANNELS * LETTERS * PAGE / CAPACITY;
    let named = |item: usize| size_of_map(item) + NAME;
    vec![
        ("threads", MAX_TASKS as usize, context),
        (
            "descriptors and operations that threads wait for",
            MAX_WAITED + MAX_TASKS as usize * WAITED_UNCHECKED,
            GROWTH * size_of::<(u64, u16)>().max(size_of::<SemaphoreOperation>()),
        ),
        ("processes", PROCESSES, process),
        ("arguments, variables and paths", PROCESSES, 3 * MAX_ARGUMENT_BYTES),
        ("mappings", MAX_ALL_MAPPINGS, size_of_map(size_of::<Mapping>())),
        ("open descriptions", MAX_DESCRIPTIONS, named(size_of::<Description>())),
        ("descriptors", MAX_ALL_DESCRIPTORS, size_of_map(24)),
        ("options of sockets", CHANNELS, OPTIONS * (size_of_map(32) + MAX_OPTION_SIZE)),
        ("channels", CHANNELS, size_of_map(size_of::<Channel>())),
        ("bytes of channels up to the usual", 1, 2 * (MAX_USUAL_BYTES + CHANNELS * PAGE)),
        ("bytes of channels beyond", 1, 2 * MAX_EXTRA_BYTES),
        ("datagrams", datagrams, GROWTH * size_of::<Datagram>()),
        ("messages with descriptors", CARRIED, size_of_map(size_of::<InFlightMessage>())),
        ("messages with credentials", CHANNELS * MAX_MESSAGES, 2 * size_of::<InFlightMessage>()),
        ("corked datagrams", 1, MAX_CORKED_BYTES),
        ("interests of epoll sets", 2 * MAX_INTERESTS, size_of_map(ROW)),
        ("watches", WATCHES, size_of_map(size_of::<InotifyWatch>())),
        ("events of watches", MAX_INSTANCES as usize * QUEUED, named(size_of::<InotifyEvent>())),
        ("named queues", posix_queues::MAX_QUEUES, (MAX_COUNT * MAX_SIZE) as usize + ROW + NAME),
        ("queues", message_queues::MAX_QUEUES, MAX_BYTES as usize + ROW),
        ("messages", message_queues::MAX_MESSAGES, GROWTH * size_of::<(i64, Vec<u8>)>()),
        ("sets of semaphores", MAX_SETS, size_of_map(size_of::<SemaphoreSet>())),
        ("semaphores", MAX_SEMAPHORES, size_of::<Semaphore>()),
        ("adjustments", MAX_ADJUSTMENTS, size_of_map(ROW)),
        ("segments of shared memory", MAX_SEGMENTS, size_of_map(ROW)),
        ("numbers of processes", PROCESSES, size_of_map(ROW)),
        ("users of processes", PROCESSES, size_of_map(ROW) + 4 * GROWTH * MAX_GROUPS),
        ("user namespaces", MAX_NAMESPACES, size_of_map(ROW)),
        ("locked mappings", MAX_ALL_MAPPINGS, GROWTH * size_of::<u64>()),
        ("locks", LOCKS, GROWTH * size_of::<FileLock>()),
        (
            "terminals",
            TERMINALS as usize,
            size_of_map(size_of::<Terminal>()) + 25 * TYPED + 2 * MAX_UNREAD_OUTPUT,
        ),
        ("host names", NAMES, size_of_map(ROW) + NAME),
        ("closed connections", MAX_ADDRESSES, ROW),
        ("unserved calls", MAX_UNSERVED, size_of_map(16)),
        ("working directories", PROCESSES, PATH_LEN),
    ]
}

/// The sum, in MiB, that `docs/decisions/bounded-sentry.md` states.
const MAX_SENTRY: usize = 4096;

#[test]
fn the_sum_of_all_maxima_is_as_the_decision_says() {
    let mut sum = 0;
    for (list, items, bytes) in maxima() {
        println!("| {list} | {items} | {bytes} | {} MiB |", (items * bytes) >> 20);
        sum += items * bytes;
    }
    println!("{} MiB", sum >> 20);
    assert!(sum >> 20 <= MAX_SENTRY, "{} MiB", sum >> 20);
}
