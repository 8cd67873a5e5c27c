//! Commands to the stub, and their layout in the control area.

use super::frame::ThreadBases;
use super::stub;

/// The stub's work: first the calls, then the copies, then the input.
#[derive(Clone, Debug, Default)]
pub(crate) struct StubCommands {
    /// System calls: number and arguments.
    pub(crate) calls: Vec<[u64; 7]>,
    /// Copies within the guest: to, from, length.
    pub(crate) copies: Vec<[u64; 3]>,
    /// Bytes for an address, at most [`INPUT_LEN`].
    pub(crate) input: Option<(u64, Vec<u8>)>,
    /// Whether all room for orders is wiped, not only these: the guest can write there.
    pub(crate) wipe: bool,
}

/// The stub's step after its commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Continuation {
    /// Ask for more.
    Ask,
    /// Go back to the guest.
    Resume,
    /// Be the zygote.
    Fork,
}

/// Longest input that orders may carry.
pub(crate) const INPUT_LEN: usize = 12 << 10;
/// Calls and copies that fit with an input.
const CALLS_AT_ONCE: usize = 100;
const COPIES_AT_ONCE: usize = 480;
const _: () = assert!(
    stub::FIRST + 64 * CALLS_AT_ONCE + 24 * (COPIES_AT_ONCE + 1) + INPUT_LEN <= stub::NEW_ACTIONS
);

impl StubCommands {
    /// Whether no command is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.copies.is_empty() && self.input.is_none() && !self.wipe
    }

    /// The same orders in pieces that fit.
    pub(super) fn pieces(&self) -> Vec<StubCommands> {
        let mut pieces: Vec<StubCommands> = self
            .calls
            .chunks(CALLS_AT_ONCE)
            .map(|calls| StubCommands { calls: calls.to_vec(), ..StubCommands::default() })
            .collect();
        // Copies come after all calls, since they may write to new mappings.
        for copies in self.copies.chunks(COPIES_AT_ONCE) {
            match pieces.last_mut() {
                Some(last) if last.copies.is_empty() => last.copies = copies.to_vec(),
                _ => {
                    pieces.push(StubCommands { copies: copies.to_vec(), ..StubCommands::default() })
                }
            }
        }
        if pieces.is_empty() {
            pieces.push(StubCommands::default());
        }
        if let Some(last) = pieces.last_mut() {
            last.input.clone_from(&self.input);
            last.wipe = self.wipe;
        }
        pieces
    }

    /// The bytes that the stub reads: header, calls, copies, input. The stub returns `receipt` once
    /// it has executed them.
    pub(super) fn encode(
        &self,
        then: Continuation,
        bases: ThreadBases,
        frame: usize,
        receipt: u64,
    ) -> Vec<u8> {
        let copies = self.copies.len() + usize::from(self.input.is_some());
        let data = stub::FIRST + 64 * self.calls.len() + 24 * copies;
        let end = data + self.input.as_ref().map_or(0, |(_, bytes)| bytes.len());
        // Pieces of orders leave the new actions alone. The list of a template comes before any.
        assert!(end <= stub::INSIDE_WORDS, "orders that do not fit are cut into pieces before");
        let mut bytes = vec![0; end];
        let mut put = |offset: usize, word: u64| {
            bytes[offset..offset + 8].copy_from_slice(&word.to_le_bytes());
        };
        put(stub::CALLS, self.calls.len() as u64);
        put(stub::COPIES, copies as u64);
        put(
            stub::CONTINUATION,
            match then {
                Continuation::Resume => 0,
                Continuation::Ask => 1,
                Continuation::Fork => stub::FORKS,
            },
        );
        put(stub::FIRST_BASE, bases.tls);
        put(stub::SECOND_BASE, bases.second);
        put(stub::WIPE, if self.wipe { stub::ORDERS_LEN } else { end } as u64);
        put(stub::FRAME, stub::CONTROL + frame as u64);
        put(stub::RECEIPT, receipt);
        let mut at = stub::FIRST;
        for call in &self.calls {
            for (index, word) in call.iter().enumerate() {
                put(at + 8 * index, *word);
            }
            at += 64;
        }
        let input = self.input.as_ref();
        let last = input.map(|(to, bytes)| [*to, stub::CONTROL + data as u64, bytes.len() as u64]);
        for copy in self.copies.iter().chain(&last) {
            for (index, word) in copy.iter().enumerate() {
                put(at + 8 * index, *word);
            }
            at += 24;
        }
        if let Some((_, input)) = input {
            bytes[data..].copy_from_slice(input);
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_all_of_it_in_order_and_fit() {
        for (calls, copies, input) in
            [(0, 0, 0), (1, 1, 1), (100, 480, INPUT_LEN), (101, 481, 5), (1000, 3000, INPUT_LEN)]
        {
            let orders = StubCommands {
                calls: (0..calls).map(|i| [i; 7]).collect(),
                copies: (0..copies).map(|i| [i; 3]).collect(),
                input: (input > 0).then(|| (9, vec![1; input])),
                wipe: true,
            };
            let pieces = orders.pieces();
            let all_calls: Vec<_> = pieces.iter().flat_map(|p| p.calls.clone()).collect();
            let all_copies: Vec<_> = pieces.iter().flat_map(|p| p.copies.clone()).collect();
            assert_eq!((all_calls, all_copies), (orders.calls.clone(), orders.copies.clone()));
            let last_call = pieces.iter().rposition(|p| !p.calls.is_empty()).unwrap_or(0);
            assert!(pieces[..last_call].iter().all(|p| p.copies.is_empty()));
            for (index, piece) in pieces.iter().enumerate() {
                let last = index + 1 == pieces.len();
                assert_eq!((piece.wipe, piece.input.is_some()), (last, last && input > 0));
                assert!(
                    piece.encode(Continuation::Ask, ThreadBases::default(), 0, 1).len()
                        <= stub::NEW_ACTIONS
                );
            }
        }
    }
}
