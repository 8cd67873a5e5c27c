//! Code in the guest's process that answers calls of the guest without the sentry, and its data.
//!
//! Sites of calls jump here ([`crate::text_twin`]) with the number of the call and the address of
//! its `syscall`. Answers come from a part of the page that the guest can only read, and which the
//! sentry fills before the guest runs. A call without an answer there continues at its `syscall`,
//! with the registers that it had: so do all calls while the page is closed, which it is whenever
//! the sentry serves a call. This code makes no system call, and the filter gives it no right.
//!
//! Two calls come here without a site: those that set or query the action for a signal, and lookups
//! of attributes that follow no link. The stub returns to this code from the SIGSYS of such a call
//! ([`super::stub`]), if the page is open. So a series of them, as `posix_spawn` and `git status`
//! make, reaches the sentry seldom, also from text that is not changed.
//!
//! A call that moves the offset of a file stores the new one among the *words*, which the guest can
//! write. One that closes a file sets its bit there. One that sets the action for a signal stores
//! the action in a table of the guest, and sets its bit. The sentry takes them over at the next
//! event. They are values that a call could have set.
//!
//! The *window* behind the page has the bytes of one file, the one that was opened last. A `read`
//! copies from there. In a guest whose text is not changed it has the attributes of files that may
//! be looked up next, in their order. The page behind the window has the actions for signals.
//!
//! ```text
//! start .. commit      the words have the number and the address of the call: it can be made anew
//! copies .. copied     they have its first two arguments, too
//! behind the commit    the call is answered
//! ```
//!
//! Promises: no frame of a thread that stops has an address of this code, because the sentry moves
//! it back to the call, or behind it. Any code of the guest may jump here, and gains nothing: this
//! code has the rights of the guest. May break it: a further store of a result before the commit.

use super::stub;

/// Descriptors with answers; the place of one is its number modulo this.
pub(crate) const DESCRIPTORS: usize = 8;
/// Bytes of `struct stat`.
pub(crate) const STAT_LEN: usize = size_of::<libc::stat>();

/// Offset of the answers in the page that the guest can only read, behind the clocks.
const ANSWERS: usize = 1024;
/// Length of the numbers that begin the answers.
pub(super) const NUMBERS_LEN: usize = 128;
/// Bytes of the answers for a descriptor: number plus one, offset, size, `struct stat`, and the
/// number of bytes of the file in the window.
pub(super) const DESCRIPTOR_LEN: usize = 192;
pub(super) const STAT: usize = 24;
pub(super) const WINDOW: usize = STAT + STAT_LEN;
const _: () = assert!(WINDOW + 8 <= DESCRIPTOR_LEN);
/// Offset in the answers of the end of the attributes in the window, an address.
pub(super) const ATTRIBUTES_END: usize = 120;
const _: () = assert!(ATTRIBUTES_END + 8 <= NUMBERS_LEN && size_of::<Numbers>() <= ATTRIBUTES_END);
/// Bytes of the attributes of a file in the window: the descriptor that the path starts from, the
/// path with its end, and `struct stat`.
pub(crate) const ATTRIBUTE_LEN: usize = 256;
pub(super) const PATH: usize = 8;
/// Maximum bytes of a path with its end.
pub(crate) const ATTRIBUTE_PATH_LEN: usize = ATTRIBUTE_LEN - STAT_LEN - PATH;
/// Maximum files with attributes in the window.
pub(crate) const MAX_ATTRIBUTES: usize = stub::WINDOW_LEN / ATTRIBUTE_LEN;

/// Length of all answers.
pub(super) const ANSWERS_LEN: usize = NUMBERS_LEN + DESCRIPTORS * DESCRIPTOR_LEN;
const _: () = assert!(ANSWERS + ANSWERS_LEN <= stub::CLOCK_PAGE_LEN);
/// Offset of the answers in the control area and the page behind it.
pub(super) const ANSWERS_AT: usize = stub::CONTROL_LEN + ANSWERS;

/// Bytes of the action for a signal.
pub(crate) const ACTION_LEN: usize = 32;
/// Length of all actions.
pub(crate) const ACTIONS_LEN: usize = 64 * ACTION_LEN;
const _: () = assert!(ACTIONS_LEN <= stub::ACTIONS_LEN);

// Words of the guest, at `stub::INSIDE_WORDS`: new offsets, plus one, and the closed places; then
// the present call, and for a copy its first two arguments and where it stores the offset. The
// lowest byte of the closed places has a bit for each, and the bits above it are a list of their
// numbers, three bits each. The last closed place is first.
pub(super) const CLOSED: usize = 8 * DESCRIPTORS;
/// Signals with a new action, a bit for each.
pub(super) const CHANGED: usize = CLOSED + 8;
/// The address of the call that has found no answer, until it is made.
pub(super) const TRIED: usize = CHANGED + 8;
/// Length of those that the sentry takes over.
pub(super) const EFFECTS_LEN: usize = TRIED + 8;
pub(super) const CALL: usize = EFFECTS_LEN;
pub(super) const NUMBER: usize = CALL + 8;
pub(super) const DESCRIPTOR: usize = NUMBER + 8;
pub(super) const BUFFER: usize = DESCRIPTOR + 8;
pub(super) const PLACE: usize = BUFFER + 8;
/// The address of the attributes that are expected next.
pub(super) const CURSOR: usize = PLACE + 8;
/// Length of the words.
const WORDS_LEN: usize = CURSOR + 8;
const _: () = assert!(stub::INSIDE_WORDS + WORDS_LEN <= stub::CHILD_PID);
const _: () = assert!(stub::NEW_ACTIONS + ACTIONS_LEN <= stub::INSIDE_WORDS);

/// Numbers of a process and its current thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Answer {
    /// Whether there are answers.
    #[default]
    Open = 0,
    Process = 1,
    Thread = 2,
    Parent = 3,
    User = 4,
    EffectiveUser = 5,
    Group = 6,
    EffectiveGroup = 7,
    ProcessGroup = 8,
    /// Signals that the thread blocks, a bit for each.
    Blocked = 9,
}

/// Values of all [`Answer`]s.
pub(crate) type Numbers = [u64; Answer::Blocked as usize + 1];
