//! Answers to calls inside the process.

use super::Process;
use crate::platform::inside::{
    ACTION_LEN, ACTIONS_LEN, ANSWERS_AT, ANSWERS_LEN, ATTRIBUTE_LEN, ATTRIBUTES_END, CHANGED,
    CURSOR, DESCRIPTOR_LEN, DESCRIPTORS, EFFECTS_LEN, NUMBERS_LEN, Numbers, PATH, STAT_LEN, WINDOW,
};
use crate::platform::stub;

/// Answers about an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DescriptorAnswers {
    pub(crate) number: u32,
    pub(crate) offset: u64,
    pub(crate) size: u64,
    pub(crate) stat: [u8; STAT_LEN],
    /// Bytes of the file in the window: all of them, or none.
    pub(crate) window: u64,
}

/// The attributes of a file that may be looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AttributeAnswer {
    /// The descriptor that the path starts from.
    pub(crate) from: i32,
    /// Fewer bytes than [`ATTRIBUTE_PATH_LEN`](crate::platform::ATTRIBUTE_PATH_LEN).
    pub(crate) path: Vec<u8>,
    pub(crate) stat: [u8; STAT_LEN],
}

/// Changes that calls inside have made. A guest could have made calls with any of these effects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct InsideEffects {
    /// New offsets, by the places of descriptors.
    pub(crate) offsets: [Option<u64>; DESCRIPTORS],
    /// Places of descriptors that are closed, in the order of the calls.
    pub(crate) closed: Vec<usize>,
    /// Signals that have a new action, and that.
    pub(crate) actions: Vec<(u64, [u8; ACTION_LEN])>,
}

impl DescriptorAnswers {
    fn encode(&self) -> [u8; DESCRIPTOR_LEN] {
        let mut bytes = [0; DESCRIPTOR_LEN];
        for (at, word) in [u64::from(self.number) + 1, self.offset, self.size].iter().enumerate() {
            bytes[8 * at..8 * at + 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes[24..24 + STAT_LEN].copy_from_slice(&self.stat);
        bytes[WINDOW..WINDOW + 8].copy_from_slice(&self.window.to_le_bytes());
        bytes
    }
}

/// The places that a word of closed ones has, in the order of the calls. Those that a guest has
/// forged are in any order.
fn closed_places(word: u64) -> Vec<usize> {
    let is_closed = |place: usize| word >> place & 1 != 0;
    let count = (word as u8).count_ones() as usize;
    let listed = (0..count).rev().map(|back| (word >> (8 + 3 * back)) as usize % DESCRIPTORS);
    let mut places = Vec::new();
    for place in listed.chain(0..DESCRIPTORS).filter(|place| is_closed(*place)) {
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

impl Process {
    /// Sets the answers of the descriptor at `place`.
    pub(crate) fn answer_descriptor(&mut self, place: usize, answers: Option<&DescriptorAnswers>) {
        let bytes = answers.map_or([0; DESCRIPTOR_LEN], DescriptorAnswers::encode);
        let at = ANSWERS_AT + NUMBERS_LEN + place * DESCRIPTOR_LEN;
        self.control.write(at, &bytes);
    }

    /// Sets the numbers. The first one shows whether calls are answered.
    pub(crate) fn answer_numbers(&mut self, numbers: &Numbers) {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.control.write(ANSWERS_AT, &bytes);
    }

    /// Sets the actions for signals.
    pub(crate) fn answer_actions(&mut self, actions: &[u8; ACTIONS_LEN]) {
        self.control.set_actions(actions);
    }

    /// Has calls for the actions of signals be answered, and lookups of `attributes` in order.
    pub(crate) fn open_answers(&mut self, attributes: &[AttributeAnswer]) {
        let mut bytes = vec![0; attributes.len() * ATTRIBUTE_LEN];
        for (entry, answer) in bytes.chunks_exact_mut(ATTRIBUTE_LEN).zip(attributes) {
            entry[..4].copy_from_slice(&answer.from.to_le_bytes());
            entry[PATH..PATH + answer.path.len()].copy_from_slice(&answer.path);
            entry[ATTRIBUTE_LEN - STAT_LEN..].copy_from_slice(&answer.stat);
        }
        if !bytes.is_empty() {
            self.control.show(&bytes);
        }
        let end = stub::WINDOW + bytes.len() as u64;
        self.control.write_word(ANSWERS_AT + ATTRIBUTES_END, end);
        self.control.write_word(stub::INSIDE_WORDS + CURSOR, stub::WINDOW);
        self.control.write_word(ANSWERS_AT, 1);
    }

    /// How many of `given` attributes the guest has passed, as it claims.
    pub(crate) fn attributes_taken(&self, given: usize) -> usize {
        let cursor = self.control.read_word(stub::INSIDE_WORDS + CURSOR);
        let passed = cursor.saturating_sub(stub::WINDOW) / ATTRIBUTE_LEN as u64;
        passed.min(given as u64) as usize
    }

    /// Has every call reach the sentry.
    pub(crate) fn close_answers(&mut self) {
        self.control.write_word(ANSWERS_AT, 0);
    }

    /// Has the window show these bytes of a file.
    pub(crate) fn show_contents(&mut self, bytes: &[u8]) {
        self.control.show(bytes);
    }

    /// Removes all answers.
    pub(crate) fn forget_answers(&mut self) {
        self.control.write(ANSWERS_AT, &[0; ANSWERS_LEN]);
        self.control.show(&[]);
    }

    /// A word of the code inside, which the guest can write.
    #[cfg_attr(target_arch = "aarch64", allow(dead_code, reason = "for x86-64"))]
    pub(in crate::platform) fn inside_word(&self, at: usize) -> u64 {
        self.control.read_word(stub::INSIDE_WORDS + at)
    }

    /// Takes what calls have changed since the last time.
    pub(crate) fn take_effects(&mut self) -> InsideEffects {
        let mut bytes = [0; EFFECTS_LEN];
        self.control.read(stub::INSIDE_WORDS, &mut bytes);
        let mut effects = InsideEffects::default();
        if bytes == [0; EFFECTS_LEN] {
            return effects;
        }
        self.control.write(stub::INSIDE_WORDS, &[0; EFFECTS_LEN]);
        let words: [u64; EFFECTS_LEN / 8] =
            std::array::from_fn(|at| u64::from_le_bytes(bytes.as_chunks().0[at]));
        for (new, word) in effects.offsets.iter_mut().zip(words) {
            *new = word.checked_sub(1).filter(|offset| *offset <= i64::MAX as u64);
        }
        effects.closed = closed_places(words[DESCRIPTORS]);
        let changed = words[CHANGED / 8];
        let changed = (1..=64_u64).filter(|signal| changed & 1 << (signal - 1) != 0);
        effects.actions.extend(changed.map(|signal| {
            let mut action = [0; ACTION_LEN];
            let at = stub::NEW_ACTIONS + (signal as usize - 1) * ACTION_LEN;
            self.control.read(at, &mut action);
            (signal, action)
        }));
        effects
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_places_are_in_the_order_of_the_calls() {
        let posted = |places: &[u64]| {
            places.iter().fold(0_u64, |word, place| {
                (word >> 8 << 11) | place << 8 | (word | 1 << place) & 0xff
            })
        };
        assert!(closed_places(0).is_empty());
        assert_eq!(closed_places(posted(&[5])), [5]);
        assert_eq!(closed_places(posted(&[6, 0, 7, 3, 1, 2, 4, 5])), [6, 0, 7, 3, 1, 2, 4, 5]);
        // Each closed place is there once, whatever the list has.
        assert_eq!(closed_places(0b1010), [1, 3]);
        assert_eq!(closed_places(u64::MAX), [7, 0, 1, 2, 3, 4, 5, 6]);
    }
}
