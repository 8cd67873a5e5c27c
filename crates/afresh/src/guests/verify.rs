//! Many calls, and before each the proof that no trace of the last one is left.
//!
//! Before every call the next instance of the pool is compared with the warm state, byte by byte
//! and global by global. The answer of a module is compared with that of an instance that has never
//! run; for other guests, with the answer to the first call. Answers of two clones of a module, a
//! component or a Linux program are compared value by value, to find random numbers that both draw.

use super::backend::{WarmGuest, dispatch};
use super::verification::{CloneRandomness, Verification};
use super::{Call, CallError, Guest, Lease, VerifyError};
use crate::describe_error;

/// The answer as text, or how the call failed, which is an answer too. The way it failed counts,
/// not where in the code.
fn answer(lease: &mut Lease<'_>, call: &Call) -> Result<String, String> {
    lease.invoke(call).map(|answer| answer.text()).map_err(|error| match &error {
        CallError::Guest { source, .. } => source.to_string(),
        _ => describe_error(&error),
    })
}

impl Guest {
    /// Makes `call` `calls` times. Each answer is compared with that of an instance that has never
    /// run, or with the first answer if the kind of guest has no such instance. `progress` is
    /// called after each call.
    ///
    /// # Errors
    /// [`VerifyError`] when no comparison can be made; a difference is not an error.
    pub fn verify(
        &self,
        call: &Call,
        calls: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Verification, VerifyError> {
        let mut found = Verification::default();
        let measures = dispatch!(Backend, &self.inner().backend, warm => warm.measures_changes());
        // A call that can never be made is not verified.
        if let Err(error @ CallError::Request { .. }) = self.invoke(call) {
            return Err(error.into());
        }
        let mut first = None;
        for done in 1..=calls {
            // Fresh entropy is a difference on purpose; it is drawn after the comparison.
            self.compare_next(&mut found)?;
            let mut pooled = self.lease().map_err(CallError::from)?;
            let given = answer(&mut pooled, call);
            if measures {
                let changed = pooled.differences()?.bytes;
                found.most_bytes_changed = found.most_bytes_changed.max(Some(changed));
            }
            // The pooled one is still out, so this is another instance. It is discarded, so that
            // the next comparison is again with one that has never run anything.
            let differs = match Lease::untouched(self).map_err(CallError::from)? {
                Some(mut untouched) => {
                    let expected = answer(&mut untouched, call);
                    untouched.discard();
                    given != expected
                }
                None => *first.get_or_insert_with(|| given.clone()) != given,
            };
            found.answers_differ += u64::from(differs);
            found.answered(&given);
            progress(done);
        }
        self.compare_next(&mut found)?;
        found.watch_clones(self, call)?;
        Ok(found)
    }

    /// Compares the instance that the next call would get with the warm state.
    fn compare_next(&self, found: &mut Verification) -> Result<(), VerifyError> {
        dispatch!(Backend, &self.inner().backend, warm => warm.compare_next(self, found))
    }
}

/// Maximum number of repeating values that are listed.
const MAX_REPEATING: usize = 100;
/// Maximum bytes of an answer whose values are compared one by one. A longer one is compared as a
/// whole.
const MAX_COMPARED: usize = 1 << 20;

/// Three answers: two of one clone, and the first of another.
struct RandomSamples {
    first: String,
    second: String,
    cloned: String,
}

impl RandomSamples {
    /// Each line as its own, and each value of a line, as far as all three answers have the same
    /// number of them.
    fn values(&self) -> Vec<(String, [&str; 3])> {
        let whole = [&*self.first, &*self.second, &*self.cloned];
        if whole.iter().any(|answer| answer.len() > MAX_COMPARED) {
            return vec![("answer".to_owned(), whole)];
        }
        let between = |c: char| c.is_whitespace() || matches!(c, ',' | ';' | '[' | ']' | '(' | ')');
        let mut values = Vec::new();
        let lines = equally(whole, "answer", "line", |c| c == '\n');
        let several = lines.len() > 1;
        for (place, line) in lines {
            let place = if several { place } else { "answer".to_owned() };
            values.extend(equally(line, &place, "value", between));
        }
        values
    }

    /// How they compare, and which values the clones share though they change.
    fn compare(&self, reseeds: bool) -> (CloneRandomness, Vec<String>) {
        let values = self.values();
        let repeating =
            values.iter().filter(|(_, [first, second, cloned])| first == cloned && first != second);
        let repeating: Vec<String> =
            repeating.take(MAX_REPEATING).map(|(place, _)| place.clone()).collect();
        let differ = values.iter().any(|(_, [first, _, cloned])| first != cloned);
        let clones = match (differ, repeating.is_empty()) {
            (true, true) => CloneRandomness::Differ,
            (true, false) => CloneRandomness::Partly,
            (false, true) => CloneRandomness::Constant,
            (false, false) if reseeds => CloneRandomness::AlikeByState,
            (false, false) => CloneRandomness::Alike,
        };
        (clones, repeating)
    }
}

/// The parts of three texts, with the place of each; the texts themselves where they have different
/// numbers of parts.
fn equally<'a>(
    texts: [&'a str; 3],
    place: &str,
    part: &str,
    between: impl Fn(char) -> bool,
) -> Vec<(String, [&'a str; 3])> {
    let [first, second, cloned] = texts.map(|text| {
        // The name of a type before its values is not a value.
        let values = text.split_inclusive(&between).filter(|part| !part.ends_with('('));
        let values = values.map(|part| part.trim_end_matches(&between));
        values.filter(|part| !part.is_empty()).collect::<Vec<_>>()
    });
    if first.len() < 2 || first.len() != second.len() || first.len() != cloned.len() {
        return vec![(place.to_owned(), texts)];
    }
    let within = if place == "answer" { String::new() } else { format!("{place}, ") };
    let parts = first.into_iter().zip(second).zip(cloned).zip(1..);
    parts.map(|(((a, b), c), at)| (format!("{within}{part} {at}"), [a, b, c])).collect()
}

impl Verification {
    /// Makes the call twice in one clone and once in another, and enters how the answers compare.
    fn watch_clones(&mut self, guest: &Guest, call: &Call) -> Result<(), VerifyError> {
        let reseeds = dispatch!(Backend, &guest.inner().backend, warm => warm.reseeds_clones());
        let Some(reseeds) = reseeds else { return Ok(()) };
        let text = |answer: Result<String, String>| answer.unwrap_or_else(|failure| failure);
        let mut one = guest.lease().map_err(CallError::from)?;
        let mut other = guest.lease().map_err(CallError::from)?;
        let (first, second) = (text(answer(&mut one, call)), text(answer(&mut one, call)));
        let draws = RandomSamples { first, second, cloned: text(answer(&mut other, call)) };
        let (clones, repeating) = draws.compare(reseeds);
        (self.clones, self.repeating) = (Some(clones), repeating);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(first: &str, second: &str, cloned: &str) -> (CloneRandomness, Vec<String>) {
        let [first, second, cloned] = [first, second, cloned].map(str::to_owned);
        RandomSamples { first, second, cloned }.compare(false)
    }

    #[test]
    fn each_value_of_an_answer_is_compared_alone() {
        // One of five generators is reseeded.
        let (clones, repeating) = draws("n 1\nm 2\nk 3\n", "n 4\nm 5\nk 6\n", "n 1\nm 9\nk 3\n");
        assert_eq!(clones, CloneRandomness::Partly);
        assert_eq!(repeating, ["line 1, value 2", "line 3, value 2"]);
        let (clones, repeating) = draws("[1, 2, 3]", "[4, 2, 5]", "[7, 2, 3]");
        assert_eq!((clones, repeating), (CloneRandomness::Partly, vec!["value 3".to_owned()]));
        assert_eq!(draws("1 2", "3 2", "4 2"), (CloneRandomness::Differ, Vec::new()));
        assert_eq!(draws("1 2", "1 2", "1 2"), (CloneRandomness::Constant, Vec::new()));
        let (clones, repeating) = draws("7", "8", "7");
        assert_eq!((clones, repeating), (CloneRandomness::Alike, vec!["answer".to_owned()]));
        // Answers of another shape are compared as a whole.
        assert_eq!(draws("1 2", "1 2 3", "1 2").0, CloneRandomness::Alike);
        assert_eq!(draws("", "", "").0, CloneRandomness::Constant);
        // The list has a limit, and so has the comparison value by value.
        let numbers = |from: u32, many: u32| {
            (from..from + many).fold(String::new(), |all, n| all + &format!("{n} "))
        };
        let (one, two) = (numbers(0, 1000), numbers(1000, 1000));
        assert_eq!(draws(&one, &two, &one).1.len(), MAX_REPEATING);
        let long = "1 ".repeat(MAX_COMPARED);
        assert_eq!(draws(&long, "2 ", &long).1, ["answer"]);
    }
}
