//! The stub under attack: from every state that a guest leaves it in, the next call starts from the
//! pristine state, and succeeds.

use std::time::Duration;

use afresh_linux::{CallError, Instance, PlatformError};
use afresh_sys::planted::{self, Bug};
use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};

use crate::common;

const PRISTINE: &[u8] = b"left:  0\n";

fn warm() -> Option<Instance> {
    common::warm("stub.c", |program| {
        program.time_limit(Duration::from_millis(500)).start_limit(Duration::from_secs(20))
    })
}

/// One attack, as the guest reads it.
#[derive(Debug)]
struct Attack {
    /// The offset of the entry in the stub; 0 is the request instruction, and [`PAGE`] the first.
    offset: u32,
    flags: u64,
    mask: u64,
    stack: u32,
    call: u32,
    entry: u32,
    keys: u32,
    /// Whether an interrupt is pending on arrival.
    pending: bool,
}

/// The guest takes offsets modulo this one.
const PAGE: u32 = 4096;
/// Stacks that an attack can have.
const STACKS: u32 = 7;

impl Attack {
    /// The trap flag, set at the request instruction: the first order is followed by a trap.
    const TRAP: Self = Self {
        offset: 0,
        flags: 0x100,
        mask: 0,
        stack: 0,
        call: 0,
        entry: 0,
        keys: 0,
        pending: false,
    };

    /// An interruption of the instruction at an offset of the stub.
    fn interrupted(offset: u32, stack: u32, pending: bool) -> Self {
        let flags = if pending { 0 } else { Self::TRAP.flags };
        Self {
            offset: if offset == 0 { PAGE } else { offset },
            stack,
            flags,
            pending,
            ..Self::TRAP
        }
    }

    fn random(random: &mut TestRng) -> Self {
        let mut pick = |values: &[u64]| values[random.next_u64() as usize % values.len()];
        // Trap, direction, nested task, resume, alignment check, identification.
        let flags =
            [0, 0x100, 0x100, 0x100, 0x400, 0x4000, 0x1_0000, 0x4_0000, 0x20_0000, 0x4_0100];
        let flags = pick(&flags) | pick(&[0, 0, 0, 0x4_0000, 0x100]);
        let mask = pick(&[0, 0, 0, u64::MAX, 1 << 4, 1 << 22, 1 << 10]);
        let (stack, call, entry) =
            (pick(&[0, 1, 2, 3, 4, 5, 6]), pick(&[0, 1, 2, 3, 4]), pick(&[0, 0, 1, 2]));
        let keys = pick(&[0, 0, 0, 3, 0xc, 0x5555_5554]);
        let pending = pick(&[0, 0, 0, 0, 0, 0, 0, 1]) == 1;
        let anywhere = pick(&[0, 0, 0, 1]) * (random.next_u64() % 700);
        Self {
            offset: anywhere as u32,
            flags,
            mask,
            stack: stack as u32,
            call: call as u32,
            entry: entry as u32,
            keys: keys as u32,
            pending,
        }
    }

    fn request(&self) -> String {
        let Self { offset, flags, mask, stack, call, entry, keys, pending } = self;
        let pending = u32::from(*pending);
        format!("attack {offset} {flags:x} {mask:x} {stack} {call} {entry} {keys} {pending} SECRET")
    }
}

/// Attempts of an attack whose next call is late. Only the attack makes it late each time, not a
/// slow machine.
const ATTEMPTS: u32 = 6;

/// Makes an attack, and calls as the next tenant does.
fn survives(instance: &mut Instance, attack: &Attack) {
    for _ in 0..ATTEMPTS {
        // Enough that the pages are in the write set, and a reset consists of copies.
        for _ in 0..3 {
            match instance.call_pristine(b"plant innocent") {
                Ok(_) | Err(CallError::Late { .. }) => {}
                Err(error) => panic!("before {attack:?}: {error}"),
            }
        }
        let answer = instance.call_pristine(attack.request().as_bytes());
        if let Err(CallError::Platform { source: PlatformError::Panicked(panic), .. }) = &answer {
            panic!("{attack:?}: {panic}");
        }
        match instance.call_pristine(b"look") {
            Ok(next) => {
                let next = String::from_utf8_lossy(&next);
                return assert_eq!(next, String::from_utf8_lossy(PRISTINE), "{attack:?}");
            }
            Err(CallError::Late { .. }) => println!("late after {attack:?}"),
            Err(error) => panic!("{attack:?} made the next call fail: {error}"),
        }
    }
    panic!("{attack:?} made the next call late, {ATTEMPTS} times");
}

#[test]
fn a_trapped_reset_is_not_taken_for_done() {
    let Some(mut instance) = warm() else { return };
    for call in 0..5 {
        for stack in 0..7 {
            survives(&mut instance, &Attack { call, stack, ..Attack::TRAP });
        }
    }
    instance.verify().unwrap();
}

#[test]
fn flags_that_a_signal_frame_does_not_set_are_reset() {
    let Some(mut instance) = warm() else { return };
    for bits in ["200000", "4000", "204000"] {
        let request = format!("flags {bits}");
        for pristine in [true, false, true] {
            if pristine {
                instance.reset();
            }
            let expected = if pristine { "0" } else { bits };
            let answer = instance.call(request.as_bytes()).unwrap();
            assert_eq!(String::from_utf8_lossy(&answer), format!("flags: {expected}\n"));
        }
    }
}

#[test]
fn an_interrupt_does_not_show_its_sender() {
    let Some(mut instance) = warm() else { return };
    let answer = instance.call_pristine(b"interrupt").unwrap();
    let expected = format!("code {} sender 0\n", libc::SI_QUEUE);
    assert_eq!(String::from_utf8_lossy(&answer), expected);
}

/// Sizes of the extended processor state in a frame: around the smallest that is valid, usual ones,
/// and beyond every frame.
const SIZES: [u32; 16] =
    [0, 1, 511, 512, 513, 515, 516, 575, 576, 579, 580, 581, 832, 2696, 1 << 20, u32::MAX];
/// Distances of that state from the end of the control area; 0 is where the kernel put it.
const PLACES: [u64; 6] = [0, 8, 504, 512, 576, 580];

#[test]
fn a_frame_whose_processor_state_is_cut_short_harms_only_its_guest() {
    let Some(mut instance) = warm() else { return };
    // A fault with a handler, and the return from one with a state and without.
    for (signal, given) in [(libc::SIGSEGV, 0), (libc::SIGSYS, 0), (libc::SIGSYS, 1)] {
        for (size, place) in SIZES.into_iter().flat_map(|size| PLACES.map(|place| (size, place))) {
            let request = format!("frame {signal} {size} {place} {given}");
            let answer = instance.call_pristine(request.as_bytes());
            if let Err(CallError::Platform { source: PlatformError::Panicked(panic), .. }) = answer
            {
                panic!("{request}: {panic}");
            }
            match instance.call_pristine(b"look") {
                Ok(next) => assert_eq!(next, PRISTINE, "{request}"),
                Err(CallError::Late { .. }) => println!("late after {request}"),
                Err(error) => panic!("{request} made the next call fail: {error}"),
            }
        }
    }
    instance.verify().unwrap();
}

/// Distance of the offsets of a short pass.
const STRIDE: usize = 9;

/// Each offset of the code, inside instructions as well: it is entered with the trap flag, and with
/// an interrupt pending. With `AFRESH_STUB_ATTACKS` the pass is complete, with each stack.
#[test]
fn no_interrupted_instruction_of_the_stub_reaches_the_next_call() {
    let Some(mut instance) = warm() else { return };
    let answer = instance.call_pristine(b"length").unwrap();
    let len: u32 = String::from_utf8(answer).unwrap().trim_end().parse().unwrap();
    assert!((64..PAGE).contains(&len), "{len}");
    let complete = std::env::var_os("AFRESH_STUB_ATTACKS").is_some();
    let (stride, stacks) = if complete { (1, STACKS) } else { (STRIDE, 1) };
    for offset in (0..len).step_by(stride) {
        for (stack, pending) in (0..stacks).flat_map(|stack| [(stack, false), (stack, true)]) {
            let stack = (offset + stack) % STACKS;
            survives(&mut instance, &Attack::interrupted(offset, stack, pending));
        }
        if offset % 16 == 0 {
            instance.verify().unwrap();
        }
    }
    instance.verify().unwrap();
}

/// Default number of attacks; `AFRESH_STUB_ATTACKS` changes it.
const ATTACKS: usize = 300;

#[test]
fn no_attack_on_the_stub_reaches_the_next_call() {
    let Some(mut instance) = warm() else { return };
    let attacks = std::env::var("AFRESH_STUB_ATTACKS").ok().and_then(|count| count.parse().ok());
    let mut seed = [5; 32];
    if attacks.is_some() {
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos();
        seed[..16].copy_from_slice(&now.to_le_bytes());
        println!("seed {seed:?}");
    }
    let mut random = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    for round in 0..attacks.unwrap_or(ATTACKS) {
        survives(&mut instance, &Attack::random(&mut random));
        if round % 16 == 0 {
            instance.verify().unwrap();
        }
    }
}

#[test]
fn planted_bugs_are_caught() {
    if warm().is_some() {
        planted::must_be_caught(
            &[Bug::StubReceipt],
            &["stub::a_trapped_reset_is_not_taken_for_done"],
        );
    }
}
