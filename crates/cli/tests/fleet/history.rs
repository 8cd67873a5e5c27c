//! The history of one sandbox, and the check that its answers come from one life.
//!
//! Each call has a number, which the guest appends to a log in its memory; an answer is the whole
//! log. So an answer names every call of its state. A file of the sandbox also has a log, to which
//! the client appends by a read and a write. One client calls at a time. A refused call may have
//! been made, but only at its place in the order. A right answer is the last answer, then refused
//! calls, then its own call. After the loss of a host it may begin with an earlier state, with
//! another generation; calls before an acknowledged save are in that state. A call that is missing
//! in one answer is in no later one.

use std::collections::BTreeSet;

/// A call's number.
pub(crate) type Call = u32;

/// Digits of a number in the guest's log.
const DIGITS: usize = 8;

/// The numbers that an answer consists of.
pub(crate) fn parse(answer: &str) -> Result<Vec<Call>, String> {
    let numbers = answer.as_bytes().chunks(DIGITS).map(|digits| {
        let digits = std::str::from_utf8(digits).ok().filter(|digits| digits.len() == DIGITS)?;
        digits.parse().ok()
    });
    numbers.collect::<Option<Vec<Call>>>().ok_or_else(|| format!("{answer:?} is no log"))
}

/// A call as the guest gets it.
pub(crate) fn text(call: Call) -> String {
    format!("{call:0DIGITS$}")
}

#[derive(Debug, Default)]
pub(crate) struct History {
    /// The number of the last call.
    sent: Call,
    /// The log of the last answer.
    last: Vec<Call>,
    /// The generation of the last answer.
    generation: u64,
    /// The length of the part of `last` that was acknowledged as saved; no save, no part.
    saved: Option<usize>,
    /// The last call before an acknowledged save that no answer has followed.
    saving: Option<Call>,
    /// Calls that an answer did not have.
    missing: BTreeSet<Call>,
    /// Calls whose connection broke: their host may make them at any later time.
    open: BTreeSet<Call>,
}

/// The relation of an answer to the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The sandbox went on from its last answer.
    Onward,
    /// This many acknowledged calls were undone with their host.
    Undone(usize),
}

impl History {
    /// Begins a call.
    pub(crate) fn call(&mut self) -> Call {
        self.sent += 1;
        self.sent
    }

    pub(crate) fn calls(&self) -> Call {
        self.sent
    }

    /// Whether the loss of a host may have taken the whole sandbox.
    pub(crate) fn is_unsaved(&self) -> bool {
        self.saved.is_none() && self.saving.is_none()
    }

    /// The call that was begun last ended without an answer and without a refusal.
    pub(crate) fn broken_off(&mut self) {
        self.open.insert(self.sent);
    }

    /// A save was acknowledged; `lost` if a host may have been lost since the last answer.
    pub(crate) fn saved(&mut self, lost: bool) {
        if lost {
            // The state that was saved may be an earlier save, to which the loss took the sandbox
            // back.
            self.saved = Some(self.saved.unwrap_or(0));
        } else {
            self.saved = Some(self.last.len());
        }
        self.saving = Some(self.sent);
    }

    /// Whether this answer lacks a call of the last one.
    pub(crate) fn is_undone_by(&self, log: &[Call]) -> bool {
        self.last.iter().any(|call| !log.contains(call))
    }

    /// Checks the answer to the call that was begun last; `lost` if a host may have been lost since
    /// the last answer.
    pub(crate) fn answered(
        &mut self,
        log: &[Call],
        generation: u64,
        lost: bool,
    ) -> Result<Step, String> {
        let firm = log.iter().rev().find(|call| !self.open.contains(call));
        if firm != Some(&self.sent) || log.last() != Some(&self.sent) {
            return Err(format!("an answer does not end with its own call: {log:?}"));
        }
        self.read(log, generation, lost)
    }

    /// Checks a log that was read after the call that was begun last; `lost` if a host may have
    /// been lost since the last answer.
    pub(crate) fn read(
        &mut self,
        log: &[Call],
        generation: u64,
        lost: bool,
    ) -> Result<Step, String> {
        let fault = |what: &str| {
            let tail = |log: &[Call]| log[log.len().saturating_sub(12)..].to_vec();
            let (had, has, saved) = (tail(&self.last), tail(log), self.saved);
            Err(format!(
                "{what}: {} calls, ending {had:?} (saved: {saved:?}), then {} calls, ending {has:?}",
                self.last.len(),
                log.len()
            ))
        };
        let all: BTreeSet<Call> = log.iter().copied().collect();
        if all.len() != log.len() {
            return fault("a call was made twice");
        }
        let firm: Vec<Call> =
            log.iter().copied().filter(|call| !self.open.contains(call)).collect();
        if !firm.is_sorted() {
            return fault("a refused call was made after a later one");
        }
        if firm.iter().any(|call| self.missing.contains(call)) {
            return fault("a call is back that an earlier answer did not have");
        }
        let common = self.last.iter().zip(&firm).take_while(|(had, has)| had == has).count();
        let undone = self.last.len() - common;
        if undone > 0 && !lost {
            return fault("an acknowledged call is lost, and no host was");
        }
        if generation < self.generation || undone > 0 && generation == self.generation {
            return fault("acknowledged calls are lost, and the generation does not show it");
        }
        if self.saved.is_some_and(|saved| common < saved) {
            return fault("an acknowledged save is lost");
        }
        self.missing = (1..=self.sent).filter(|call| !all.contains(call)).collect();
        if let Some(saving) = self.saving.take() {
            // Without a loss since the save, this answer begins with the saved state.
            let length = firm.iter().take_while(|call| **call <= saving).count();
            self.saved = self.saved.map(|saved| if lost { saved } else { length });
        }
        self.last = firm;
        self.generation = generation;
        Ok(if undone == 0 { Step::Onward } else { Step::Undone(undone) })
    }
}

/// A history with these answers, each to the call after the last; nothing is refused.
fn answered(answers: &[&[Call]]) -> History {
    let mut history = History::default();
    for log in answers {
        history.call();
        history.answered(log, 0, false).unwrap();
    }
    history
}

#[test]
fn the_checker_accepts_refused_calls_at_their_place() {
    let mut history = answered(&[&[1], &[1, 2]]);
    for _ in 0..3 {
        history.call();
    }
    assert_eq!(history.answered(&[1, 2, 4, 5], 0, false), Ok(Step::Onward));
    history.call();
    assert!(history.answered(&[1, 2, 3, 4, 5, 6], 0, false).is_err(), "3 was missing");
}

#[test]
fn the_checker_finds_lost_and_repeated_and_late_calls() {
    let next = |log: &[Call], lost| {
        let mut history = answered(&[&[1], &[1, 2]]);
        history.call();
        history
            .answered(log, u64::from(lost), lost)
            .map_err(|what| what.split(':').next().unwrap().to_owned())
    };
    let lost = Err("an acknowledged call is lost, and no host was".to_owned());
    assert_eq!(next(&[1, 3], false), lost);
    assert_eq!(next(&[1, 3], true), Ok(Step::Undone(1)));
    assert_eq!(next(&[3], true), Ok(Step::Undone(2)));
    assert_eq!(next(&[1, 2, 2, 3], false), Err("a call was made twice".to_owned()));
    assert_eq!(next(&[2, 1, 3], true), Err("a refused call was made after a later one".to_owned()));
    assert_eq!(next(&[1, 2], true), Err("an answer does not end with its own call".to_owned()));
}

#[test]
fn the_checker_finds_a_write_that_was_lost_or_late() {
    let mut history = answered(&[&[1], &[1, 2]]);
    assert_eq!(history.read(&[1, 2], 0, false), Ok(Step::Onward));
    assert!(history.read(&[1], 0, false).is_err());
    // The third write was refused, and is not in the file; so it is never there.
    let mut history = answered(&[&[1], &[1, 2]]);
    history.call();
    assert_eq!(history.read(&[1, 2], 0, false), Ok(Step::Onward));
    assert!(history.read(&[1, 2, 3], 0, false).is_err());
}

#[test]
fn the_checker_finds_two_lives() {
    let mut history = answered(&[&[1], &[1, 2]]);
    history.call();
    assert_eq!(history.answered(&[1, 3], 1, true), Ok(Step::Undone(1)));
    history.call();
    let what = history.answered(&[1, 2, 4], 2, true).unwrap_err();
    assert!(what.starts_with("a call is back"), "{what}");
}

#[test]
fn the_checker_finds_undone_calls_without_a_new_generation() {
    let mut history = answered(&[&[1], &[1, 2]]);
    history.call();
    let what = history.answered(&[1, 3], 0, true).unwrap_err();
    assert!(what.contains("the generation does not show it"), "{what}");
}

#[test]
fn the_checker_keeps_what_a_pause_acknowledged() {
    let mut history = answered(&[&[1], &[1, 2]]);
    history.saved(false);
    history.call();
    let what = history.answered(&[1, 3], 1, true).unwrap_err();
    assert!(what.starts_with("an acknowledged save is lost"), "{what}");
    // A refused call before the save is also saved, once an answer shows it.
    let mut history = answered(&[&[1]]);
    history.call();
    history.saved(false);
    history.call();
    assert_eq!(history.answered(&[1, 2, 3], 0, false), Ok(Step::Onward));
    history.call();
    assert!(history.answered(&[1, 4], 1, true).is_err());
    // A save during the loss of a host keeps at least the save before it.
    let mut history = answered(&[&[1], &[1, 2]]);
    history.saved(true);
    history.call();
    assert_eq!(history.answered(&[3], 1, true), Ok(Step::Undone(2)));
}

#[test]
fn the_checker_lets_a_call_without_an_end_come_later() {
    let mut history = answered(&[&[1]]);
    history.call();
    history.broken_off();
    history.call();
    assert_eq!(history.answered(&[1, 3], 0, false), Ok(Step::Onward));
    history.call();
    assert_eq!(history.answered(&[1, 3, 2, 4], 0, false), Ok(Step::Onward));
    history.call();
    assert!(history.answered(&[1, 3, 2, 2, 4, 5], 0, false).is_err());
}
