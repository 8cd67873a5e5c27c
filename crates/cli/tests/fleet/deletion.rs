//! The check of answers to the deletion of one sandbox.

/// The outcome of a deletion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deletion {
    Done,
    /// The sandbox was lost with its host, or deleted by an earlier request.
    Gone,
    Refused,
}

/// The requests to delete one sandbox.
#[derive(Debug, Default)]
pub(crate) struct Deletions {
    /// Whether one may have been made all the same: it had no answer, or an error, after which its
    /// host still removes the entry.
    may_be_made: bool,
}

impl Deletions {
    /// The outcome of one with this status, unless it is a violation. `may_be_lost` if the sandbox
    /// may have been lost since its last answer.
    pub(crate) fn answered(&mut self, status: u16, may_be_lost: bool) -> Result<Deletion, String> {
        match status {
            204 => Ok(Deletion::Done),
            404 if self.may_be_made || may_be_lost => Ok(Deletion::Gone),
            0 | 429 | 503 | 504 => {
                self.may_be_made |= status != 429;
                Ok(Deletion::Refused)
            }
            404 => Err("it is lost before its deletion".to_owned()),
            status => Err(format!("its deletion is answered with {status}")),
        }
    }
}

#[test]
fn a_sandbox_that_is_missing_at_its_first_deletion_is_lost() {
    assert!(Deletions::default().answered(404, false).is_err());
    assert_eq!(Deletions::default().answered(404, true), Ok(Deletion::Gone));
    assert_eq!(Deletions::default().answered(204, false), Ok(Deletion::Done));
    for (refusal, is_accepted) in [(0, true), (503, true), (504, true), (429, false)] {
        let mut deletions = Deletions::default();
        assert_eq!(deletions.answered(refusal, false), Ok(Deletion::Refused));
        assert_eq!(deletions.answered(404, false).is_ok(), is_accepted, "{refusal}");
    }
}
