//! The journal of a session in a remote: an object for each turn.
//!
//! Promises: a turn is acknowledged when it is there and a name leads to its journal. The frame
//! that closes a journal refuses later turns, until a collection removes the frame. So a writer
//! that was silent for long looks for a name of its session first. May break it: clocks that are
//! wrong by a day.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::cost::ChainCost;
use super::frame::closing;
use crate::disk::two_clocks::TwoClocks;
use crate::format::descriptor::JOURNALS;
use crate::{SaveError, Sha256};

/// How long a journal counts as named after it was. Collections remove no turn that is younger than
/// four times that.
pub(crate) const NAMED_FOR: Duration = Duration::from_secs(12 * 3600);

/// A remote that keeps each turn as an object.
pub(crate) trait TurnObjects: std::fmt::Debug + Send + Sync {
    /// Puts turn `number` of `journal`, unless it is there. False if another writer has put one
    /// there. After an error it may be there.
    fn put_turn(&self, journal: &str, number: usize, turn: &[u8]) -> Result<bool, SaveError>;

    /// Whether a name means the manifest `base`.
    fn has_name(&self, base: Sha256) -> Result<bool, SaveError>;
}

/// A turn that a remote may have: the request that puts it failed.
#[derive(Clone, Debug)]
pub(super) struct UnansweredTurn {
    pub(super) frame: Vec<u8>,
    pub(super) root: [u8; 32],
    pub(super) cost: ChainCost,
}

/// A journal in a remote.
#[derive(Clone, Debug)]
pub(crate) struct RemoteJournal {
    remote: Arc<dyn TurnObjects>,
    /// Its turns are below this name.
    id: String,
    /// It takes no more turns.
    closed: bool,
    /// The next turn, if it may be there.
    unanswered: Option<UnansweredTurn>,
    /// A time at which a name led to it.
    named_at: TwoClocks,
}

impl RemoteJournal {
    /// The journal `id`, to which a name led at `named_at`.
    pub(crate) fn new(
        remote: Arc<dyn TurnObjects>,
        id: String,
        closed: bool,
        named_at: TwoClocks,
    ) -> Self {
        Self { remote, id, closed, unanswered: None, named_at }
    }

    /// Whether it takes no more turns.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// The error for a session that another writer continues.
    pub(super) fn moved(&self) -> SaveError {
        SaveError::Moved(Path::new(JOURNALS).join(&self.id))
    }

    /// Notes the next turn. [`RemoteJournal::settle`] puts it.
    pub(super) fn put_next(&mut self, turn: UnansweredTurn) {
        self.unanswered = Some(turn);
    }

    /// Puts the turn without an answer behind `turns` turns of the manifest `base`, and returns it.
    pub(super) fn settle(
        &mut self,
        base: Sha256,
        turns: usize,
    ) -> Result<Option<UnansweredTurn>, SaveError> {
        let Some(turn) = self.unanswered.take() else { return Ok(None) };
        let now = TwoClocks::now();
        match self.put(base, turns, &turn) {
            Ok(true) => {
                self.named_at = now;
                Ok(Some(turn))
            }
            Ok(false) => Err(self.moved()),
            Err(error) => {
                self.unanswered = Some(turn);
                Err(error)
            }
        }
    }

    /// Puts a turn. False if another writer has put one there, or no name leads to the journal.
    fn put(
        &mut self,
        base: Sha256,
        turns: usize,
        turn: &UnansweredTurn,
    ) -> Result<bool, SaveError> {
        if self.named_at.is_older_than(NAMED_FOR) && !self.remote.has_name(base)? {
            return Ok(false);
        }
        if self.remote.put_turn(&self.id, turns, &turn.frame)? {
            return Ok(true);
        }
        // A closed journal is replaced by the next save, if the name still means it.
        self.closed = self.remote.put_turn(&self.id, turns, &closing(&base, turns))?;
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    #[derive(Debug, Default)]
    struct Objects {
        has_name: AtomicBool,
        looks: AtomicUsize,
        puts: AtomicUsize,
    }

    impl TurnObjects for Objects {
        fn put_turn(&self, _: &str, _: usize, _: &[u8]) -> Result<bool, SaveError> {
            self.puts.fetch_add(1, Ordering::Relaxed);
            Ok(true)
        }

        fn has_name(&self, _: Sha256) -> Result<bool, SaveError> {
            self.looks.fetch_add(1, Ordering::Relaxed);
            Ok(self.has_name.load(Ordering::Relaxed))
        }
    }

    /// Puts a turn. The result, and the looks for a name and puts until then.
    fn put(objects: &Objects, journal: &mut RemoteJournal) -> (bool, usize, usize) {
        let cost = ChainCost::new();
        journal.put_next(UnansweredTurn { frame: vec![1], root: [2; 32], cost });
        let result = journal.settle(Sha256([0; 32]), 0);
        assert!(matches!(result, Ok(Some(_)) | Err(SaveError::Moved(_))), "{result:?}");
        let count = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        (result.is_ok(), count(&objects.looks), count(&objects.puts))
    }

    #[test]
    fn a_writer_that_was_silent_for_long_looks_for_the_name_of_its_session() {
        let objects = Arc::new(Objects::default());
        let journal = |named_at| RemoteJournal::new(objects.clone(), "a".into(), false, named_at);
        assert_eq!(put(&objects, &mut journal(TwoClocks::now())), (true, 0, 1));
        // Its journal may have been closed and collected.
        let long_ago = TwoClocks::now().before_suspension(NAMED_FOR);
        assert_eq!(put(&objects, &mut journal(long_ago)), (false, 1, 1));
        objects.has_name.store(true, Ordering::Relaxed);
        let mut journal = journal(long_ago);
        assert_eq!(put(&objects, &mut journal), (true, 2, 2));
        assert_eq!(put(&objects, &mut journal), (true, 2, 3));
    }
}
