//! Segment bases of a program: those that an instruction sets, and those that a call sets, are in
//! every state that is saved.

use crate::common;

use afresh_linux::{CallError, End, Instance, Program, Warm};

/// The bases, and the result of the call that set one.
type Answer = (u64, u64, i64);

fn set(instance: &mut Instance, kind: u8, base: u64) -> Result<Answer, CallError> {
    let request = [&[kind][..], &base.to_le_bytes()].concat();
    let answer = instance.call(&request)?;
    let word = |at: usize| u64::from_le_bytes(answer[8 * at..][..8].try_into().unwrap());
    Ok((word(0), word(1), word(2) as i64))
}

#[test]
fn a_saved_program_has_the_bases_that_it_had() {
    let Some(path) = common::compiled("bases.c", &["-static"]) else { return };
    let program = Program::new(path);
    let Some(warm) = common::here(program.warm()) else { return };
    // At the end of user memory, beyond it, and in the kernel's half.
    for base in [0x42_000, 0x7fff_ffff_f000, 0x7fff_ffff_ffff, !0 << 47, u64::MAX] {
        for kind in *b"fg" {
            let mut instance = warm.instance();
            let before = set(&mut instance, b's', 0).unwrap();
            let wanted = if kind == b'f' { (base, before.1, 0) } else { (before.0, base, 0) };
            assert_eq!(set(&mut instance, kind, base).unwrap(), wanted);
            let frozen = instance.freeze().unwrap();
            let mut thawed = Warm::thaw(&frozen, &program).unwrap().instance();
            for _ in 0..2 {
                assert_eq!(set(&mut thawed, b's', 0).unwrap(), wanted, "{base:#x}");
                thawed.verify().unwrap();
            }
            instance.verify().unwrap();
            assert_eq!(set(&mut instance, b's', 0).unwrap(), before);
        }
    }
}

#[test]
fn a_base_beyond_user_memory_is_refused_and_another_address_is_a_fault() {
    let Some(mut instance) = common::warm("bases.c", |program| program) else { return };
    let before = set(&mut instance, b's', 0).unwrap();
    let refused = (before.0, before.1, -i64::from(libc::EPERM));
    for base in [0x7fff_ffff_f000, 1 << 47, 1 << 63, u64::MAX] {
        for kind in *b"FG" {
            assert_eq!(set(&mut instance, kind, base).unwrap(), refused, "{base:#x}");
        }
    }
    for kind in *b"fg" {
        let fault = set(&mut instance, kind, 1 << 63).unwrap_err();
        let is_fault = |end: &End| matches!(end, End::Signal(libc::SIGSEGV));
        assert!(matches!(&fault, CallError::Ended { end, .. } if is_fault(end)), "{fault:?}");
        instance.reset();
        assert_eq!(set(&mut instance, b's', 0).unwrap(), before);
    }
}
