//! Orders to the stub, and how they lie in the control area.

use super::control::Control;
use super::frame::Bases;
use super::image::{Image, Segment};
use super::{filter, stub};

/// What the stub is to do: first the calls, then the copies, then the input.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orders {
    /// System calls: number and arguments.
    pub(crate) calls: Vec<[u64; 7]>,
    /// Copies within the guest: to, from, length.
    pub(crate) copies: Vec<[u64; 3]>,
    /// Bytes for an address, at most [`INPUT_LEN`].
    pub(crate) input: Option<(u64, Vec<u8>)>,
    /// Whether all room for orders is wiped, not only these: the guest can write there.
    pub(crate) wipe: bool,
}

/// What the stub does after its orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// Ask for more.
    Ask,
    /// Go back to the guest.
    Resume,
}

/// Longest input that orders may carry.
pub(crate) const INPUT_LEN: usize = 12 << 10;
/// Calls and copies that fit beside an input.
const CALLS_AT_ONCE: usize = 100;
const COPIES_AT_ONCE: usize = 500;
const _: () = assert!(
    stub::FIRST + 64 * CALLS_AT_ONCE + 24 * (COPIES_AT_ONCE + 1) + INPUT_LEN <= stub::ORDERS_LEN
);
/// Mappings of the image that a process makes while it boots, before each call is looked at.
pub(crate) const BOOT_SEGMENTS: usize = 400;

impl Orders {
    /// The same orders in pieces that fit.
    pub(super) fn pieces(&self) -> Vec<Orders> {
        let mut pieces: Vec<Orders> = self
            .calls
            .chunks(CALLS_AT_ONCE)
            .map(|calls| Orders { calls: calls.to_vec(), ..Orders::default() })
            .collect();
        // Copies come after all calls, for they may go into what the calls map.
        for copies in self.copies.chunks(COPIES_AT_ONCE) {
            match pieces.last_mut() {
                Some(last) if last.copies.is_empty() => last.copies = copies.to_vec(),
                _ => pieces.push(Orders { copies: copies.to_vec(), ..Orders::default() }),
            }
        }
        if pieces.is_empty() {
            pieces.push(Orders::default());
        }
        if let Some(last) = pieces.last_mut() {
            last.input.clone_from(&self.input);
            last.wipe = self.wipe;
        }
        pieces
    }

    /// The bytes that the stub reads: header, calls, copies, input.
    pub(super) fn encode(&self, then: Then, bases: Bases, frame: usize) -> Vec<u8> {
        let copies = self.copies.len() + usize::from(self.input.is_some());
        let data = stub::FIRST + 64 * self.calls.len() + 24 * copies;
        let end = data + self.input.as_ref().map_or(0, |(_, bytes)| bytes.len());
        assert!(end <= stub::ORDERS_LEN, "orders that do not fit are cut into pieces before");
        let mut bytes = vec![0; end];
        let mut put = |offset: usize, word: u64| {
            bytes[offset..offset + 8].copy_from_slice(&word.to_le_bytes());
        };
        put(stub::CALLS, self.calls.len() as u64);
        put(stub::COPIES, copies as u64);
        put(stub::AGAIN, u64::from(then == Then::Ask));
        put(stub::FS_BASE, bases.fs);
        put(stub::GS_BASE, bases.gs);
        put(stub::WIPE, if self.wipe { stub::ORDERS_LEN } else { end } as u64);
        put(stub::FRAME, stub::CONTROL + frame as u64);
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

/// The orders that a new process starts with. Until the filter is there its calls are its own.
pub(super) fn boot(control: &mut Control, image: Option<&Image>) {
    // Structures that the calls point to lie at the end of the signal stack, which nothing uses yet.
    let data = stub::CONTROL_LEN - 4096;
    let at = |offset: usize| stub::CONTROL + (data + offset) as u64;
    let mut words = |offset: usize, words: &[u64]| {
        for (index, word) in words.iter().enumerate() {
            control.write_word(data + offset + 8 * index, *word);
        }
    };
    words(0, &[stub::SIGNAL_STACK, 0, stub::SIGNAL_STACK_LEN as u64]);
    // SA_SIGINFO, SA_RESTORER, SA_ONSTACK; all other signals wait.
    words(32, &[stub::CODE, 0x0c00_0004, stub::CODE, u64::MAX]);
    words(64, &[0, 0]);
    let program = filter::program();
    words(80, &[program.len() as u64, at(128)]);
    let mut filter = Vec::new();
    for step in &program {
        filter.extend(step.code.to_le_bytes());
        filter.extend([step.jt, step.jf]);
        filter.extend(step.k.to_le_bytes());
    }
    control.write(data + 128, &filter);

    let private = libc::MAP_PRIVATE as u64;
    let fixed = libc::MAP_FIXED as u64;
    let lazy = libc::MAP_NORESERVE as u64;
    let read = libc::PROT_READ as u64;
    let call = |number: libc::c_long, args: [u64; 6]| {
        let mut call = [number as u64; 7];
        call[1..].copy_from_slice(&args);
        call
    };
    let behind = stub::CONTROL + stub::CONTROL_LEN as u64;
    let image_len = image.map_or(0, |image| image.len());
    let mut calls = vec![
        call(libc::SYS_close_range, [3, u64::from(u32::MAX), 0, 0, 0, 0]),
        call(libc::SYS_prctl, [libc::PR_SET_NO_NEW_PRIVS as u64, 1, 0, 0, 0, 0]),
        call(libc::SYS_prctl, [libc::PR_SET_PDEATHSIG as u64, libc::SIGKILL as u64, 0, 0, 0, 0]),
        call(libc::SYS_prlimit64, [0, u64::from(libc::RLIMIT_CORE), at(64), 0, 0, 0]),
        // Nothing of what the kernel mapped remains: no stack, no vDSO.
        call(libc::SYS_munmap, [0, stub::CODE, 0, 0, 0, 0]),
        call(libc::SYS_munmap, [behind, stub::TOP - behind, 0, 0, 0, 0]),
        call(libc::SYS_sigaltstack, [at(0), 0, 0, 0, 0, 0]),
        call(libc::SYS_rt_sigaction, [libc::SIGSYS as u64, at(32), 0, 8, 0, 0]),
    ];
    if let Some(image) = image {
        calls.push(call(
            libc::SYS_mmap,
            [stub::IMAGE, image_len, read, private | fixed | lazy, 1, 0],
        ));
        calls.extend(image.segments().iter().take(BOOT_SEGMENTS).map(Segment::order));
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | 1; // faults of user code only: no privilege needed
        calls.push(call(libc::SYS_userfaultfd, [flags as u64, 0, 0, 0, 0, 0]));
    }
    let listen = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    calls.push(call(
        libc::SYS_seccomp,
        [u64::from(libc::SECCOMP_SET_MODE_FILTER), listen, at(80), 0, 0, 0],
    ));
    let list = Orders { calls, ..Orders::default() };
    control.write(0, &list.encode(Then::Ask, Bases::default(), stub::ORDERS_LEN));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_all_of_it_in_order_and_fit() {
        for (calls, copies, input) in
            [(0, 0, 0), (1, 1, 1), (100, 500, INPUT_LEN), (101, 501, 5), (1000, 3000, INPUT_LEN)]
        {
            let orders = Orders {
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
                assert!(piece.encode(Then::Ask, Bases::default(), 0).len() <= stub::ORDERS_LEN);
            }
        }
    }
}
