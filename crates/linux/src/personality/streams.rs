//! What goes in and out of a call, who hears it meanwhile, and how a guest ends in the middle of one.
//!
//! Promises: a call has at most so many bytes of output, kept or heard. May break it: nothing of the guest's; it is the sentry's own.

use super::Ear;

/// What goes in and out of a call.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(crate) input: Vec<u8>,
    /// Bytes of the input that were read.
    pub(crate) taken: usize,
    /// Whether the input has ended, and nobody was told yet.
    pub(crate) ended: bool,
    /// Whether nobody ever calls it: it runs to its end.
    pub(crate) uncalled: bool,
    /// What the caller has called through, once there was a call.
    pub(crate) through: Option<Ear>,
    /// Whether an answer is expected.
    pub(crate) expects: bool,
    pub(crate) output: Vec<u8>,
    /// Who hears output while the guest runs; it is not kept then.
    pub(crate) hearer: Option<Hearer>,
    /// Bytes that were heard.
    heard: usize,
    /// The end of what was written to the standard error.
    pub(crate) messages: Vec<u8>,
}

/// Where what a program writes comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Channel {
    /// Its standard output, or the connection that it is called through.
    Output,
    /// Its standard error.
    Messages,
    /// The device `/dev/host`: what is for the host alone.
    Host,
}

/// Who has written something, and where to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Writer {
    /// Where to.
    pub channel: Channel,
    /// The process that leads the session (`setsid`) of the one that has written it; nothing where that is the program's own.
    pub leader: Option<u32>,
}

/// Hears what a guest writes, when it does; `false` where nobody wants it any more, which ends the guest.
pub(crate) struct Hearer(pub(crate) Box<Hear>);

type Hear = dyn FnMut(Writer, &[u8]) -> bool + Send;

impl std::fmt::Debug for Hearer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hearer")
    }
}

impl Streams {
    /// Takes output, of which a call may have so many bytes.
    pub(crate) fn put_out(&mut self, from: Writer, bytes: &[u8], limit: usize) -> Result<(), End> {
        let so_far = self.heard + self.output.len();
        if so_far.saturating_add(bytes.len()) > limit {
            return Err(End::Output);
        }
        let Some(Hearer(hear)) = &mut self.hearer else {
            self.output.extend(bytes);
            return Ok(());
        };
        self.heard += bytes.len();
        if hear(from, bytes) { Ok(()) } else { Err(End::Unheard) }
    }

    /// Has a message heard, where somebody hears.
    pub(crate) fn hear_message(
        &mut self,
        from: Writer,
        bytes: &[u8],
        limit: usize,
    ) -> Result<(), End> {
        match self.hearer {
            Some(_) => self.put_out(from, bytes, limit),
            None => Ok(()),
        }
    }

    /// Has `hearer` hear the output of the next call, or of none any more.
    pub(crate) fn set_hearer(&mut self, hearer: Option<Hearer>) {
        (self.hearer, self.heard) = (hearer, 0);
    }

    /// Whether something of an answer was kept or heard.
    pub(crate) fn has_answered(&self) -> bool {
        self.heard > 0 || !self.output.is_empty()
    }

    /// Whether a read of the input need not wait.
    pub(crate) fn has_input(&self) -> bool {
        self.ended || self.taken < self.input.len()
    }
}

/// How a guest ended, in the middle of a call or before it was warm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// It exited with this status.
    Exit(i32),
    /// It sent itself this signal, or made a system call that ends in one.
    Signal(i32),
    /// It waits for what can never happen.
    Deadlock,
    /// It wrote more than it may.
    Output,
    /// Whoever heard its output wants no more of it.
    Unheard,
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Exit(status) => write!(f, "exited with status {status}"),
            End::Signal(number) => write!(f, "ended by signal {number}"),
            End::Deadlock => f.write_str("waits for what can never happen"),
            End::Output => f.write_str("wrote more output than it may"),
            End::Unheard => f.write_str("was ended by whoever heard its output"),
        }
    }
}
