//! The guest is not trusted: neither its arguments of hypercalls, nor its file.

use std::sync::OnceLock;

use crate::common::{guest, kvm, words};
use afresh_vm::{AccessError, CallError, ElfError, GuestError, Program, Sandbox};
use proptest::prelude::*;

fn elf() -> &'static [u8] {
    static ELF: OnceLock<Vec<u8>> = OnceLock::new();
    ELF.get_or_init(|| guest("dirty"))
}

/// Addresses and lengths at and around every edge.
fn hostile() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        0..0x100_0000_u64,
        prop::sample::select(vec![
            0,
            1,
            0xfff,
            0x3_ffff,
            0x4_0000,
            0x23_ffff,
            0x24_0000,
            0x24_1000,
            u64::MAX,
            u64::MAX - 7,
            1 << 63,
            0xffff_8000_0000_0000,
        ]),
        (0..64_u32).prop_map(|bit| 1 << bit),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn no_hypercall_reaches_beyond_the_guest(
        number in prop_oneof![0..12_u64, any::<u64>()],
        arguments in prop::array::uniform5(hostile()),
    ) {
        if !kvm() {
            return Ok(());
        }
        thread_local! {
            static SANDBOX: std::cell::RefCell<Option<Sandbox>> = const { std::cell::RefCell::new(None) };
        }
        SANDBOX.with_borrow_mut(|slot| {
            let sandbox = slot.get_or_insert_with(|| {
                let builder = Sandbox::builder()
                    .memory(2 << 20)
                    .host_function("bytes", |bytes: Vec<u8>| bytes)
                    .host_function("sum", |a: u64, b: u32| a.wrapping_add(u64::from(b)))
                    .log(|_, _| {});
                builder.build(elf()).unwrap()
            });
            let [a, b, c, d, e] = arguments;
            match sandbox.run(&words(&[7, number, a, b, c, d, e])) {
                // A hypercall that ends the call returns bytes of guest memory.
                Ok(output) => prop_assert!(output.len() <= 2 << 20),
                Err(CallError::Guest(_)) => {}
                Err(other) => return Err(TestCaseError::fail(format!("{other}"))),
            }
            prop_assert!(sandbox.verify().is_ok());
            Ok(())
        })?;
    }

    #[test]
    fn no_damaged_file_is_more_than_an_error(
        damage in prop::collection::vec((0..1200_usize, any::<u8>()), 1..6),
        cut in prop::option::of(0..70_000_usize),
    ) {
        let mut bytes = elf().to_vec();
        for (at, value) in damage {
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut);
        }
        if let Ok(program) = Program::parse(&bytes) {
            prop_assert!(program.entry() < program.span());
        }
    }
}

#[test]
fn no_page_of_several_segments_is_writable_and_executable() {
    // Flags of segments of 16 bytes, one behind the other in one page: 1 executes, 2 writes.
    let parse = |flags: &[u32]| {
        let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
        bytes.resize(16, 0);
        bytes.extend([3_u16, 62].map(u16::to_le_bytes).concat());
        bytes.extend(1_u32.to_le_bytes());
        let code = flags.iter().position(|flags| flags & 1 != 0).unwrap() as u64 * 16;
        bytes.extend([code, 64, 0].map(u64::to_le_bytes).concat());
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend([64, 56, flags.len() as u16, 0, 0, 0].map(u16::to_le_bytes).concat());
        for (number, flags) in flags.iter().enumerate() {
            bytes.extend([1, *flags].map(u32::to_le_bytes).concat());
            let address = number as u64 * 16;
            bytes.extend([0, address, address, 0, 16, 1].map(u64::to_le_bytes).concat());
        }
        Program::parse(&bytes).map(|program| program.span())
    };
    assert_eq!(parse(&[4, 5, 4]), Ok(4096));
    assert_eq!(parse(&[5, 6]), Err(ElfError::WritableCode(1)));
    assert_eq!(parse(&[6, 4, 5]), Err(ElfError::WritableCode(2)));
    assert_eq!(parse(&[5, 4, 4, 6]), Err(ElfError::WritableCode(3)));
}

#[test]
fn each_malformed_field_has_its_own_error() {
    let with = |at: usize, value: &[u8]| {
        let mut bytes = elf().to_vec();
        bytes[at..at + value.len()].copy_from_slice(value);
        Program::parse(&bytes).map(|_| ()).unwrap_err()
    };
    assert_eq!(Program::parse(b"").map(|_| ()).unwrap_err(), ElfError::NotElf);
    assert_eq!(Program::parse(&elf()[..40]).map(|_| ()).unwrap_err(), ElfError::NotElf);
    assert_eq!(with(0, b"MZ"), ElfError::NotElf);
    assert_eq!(with(4, &[1]), ElfError::Class(1));
    assert_eq!(with(5, &[2]), ElfError::Encoding(2));
    assert_eq!(with(6, &[0]), ElfError::Version);
    assert_eq!(with(16, &[2, 0]), ElfError::NotPie);
    assert_eq!(with(16, &[1, 0]), ElfError::Type(1));
    assert_eq!(with(18, &[183, 0]), ElfError::Machine(183));
    assert_eq!(with(24, &0x10_0000_u64.to_le_bytes()), ElfError::Entry(0x10_0000));
    assert_eq!(with(32, &u64::MAX.to_le_bytes()), ElfError::ProgramHeaders);
    assert_eq!(with(54, &[3, 0]), ElfError::ProgramHeaders);

    // Program headers, found by type; each is 56 bytes from offset 64 on.
    let header = |wanted: u32, skip: usize| {
        (0..)
            .map(|index| 64 + index * 56)
            .filter(|at| elf()[*at..at + 4] == wanted.to_le_bytes())
            .nth(skip)
            .unwrap()
    };
    let (load, second, dynamic) = (header(1, 0), header(1, 1), header(2, 0));
    assert_eq!(with(load, &[3]), ElfError::Interpreter);
    assert_eq!(with(load, &[7]), ElfError::ThreadLocal);
    let index = (load - 64) / 56;
    assert_eq!(with(load + 8, &u64::MAX.to_le_bytes()), ElfError::SegmentFile(index));
    assert_eq!(with(load + 40, &1_u64.to_le_bytes()), ElfError::SegmentSize(index));
    assert_eq!(with(load + 16, &u64::MAX.to_le_bytes()), ElfError::SegmentAddress(index));
    assert_eq!(with(load + 48, &3_u64.to_le_bytes()), ElfError::SegmentAlign(index, 3));
    assert_eq!(with(second + 16, &[0; 8]), ElfError::SegmentOverlap(index + 1));
    assert_eq!(with(second + 4, &[7]), ElfError::WritableCode(index + 1));
    assert_eq!(with(dynamic + 8, &u64::MAX.to_le_bytes()), ElfError::Dynamic);

    // The dynamic section and the first relocation.
    let word = |at: usize| u64::from_le_bytes(elf()[at..at + 8].try_into().unwrap()) as usize;
    let entries = word(dynamic + 8);
    let entry =
        |tag: u64| (0..).map(|i| entries + i * 16).find(|at| word(*at) == tag as usize).unwrap();
    assert_eq!(with(entry(7) + 8, &u64::MAX.to_le_bytes()), ElfError::RelocationTable);
    assert_eq!(with(entry(9) + 8, &[7]), ElfError::RelocationTable);
    assert_eq!(with(entry(7), &[1]), ElfError::NeedsLibrary);
    // The table is in the first segment, where offsets and addresses agree.
    let first = word(entry(7) + 8);
    assert_eq!(with(first + 8, &[6]), ElfError::RelocationType(6));
    // The same table as that of calls: `DT_JMPREL` and `DT_PLTRELSZ`.
    let of_calls = |kind: u8| {
        let mut bytes = elf().to_vec();
        (bytes[entry(7)], bytes[entry(8)], bytes[first + 8]) = (23, 2, kind);
        Program::parse(&bytes).map(|_| ())
    };
    assert_eq!(of_calls(8), Ok(()));
    assert_eq!(of_calls(37), Err(ElfError::RelocationType(37)));
    assert_eq!(with(first, &u64::MAX.to_le_bytes()), ElfError::RelocationTarget(u64::MAX));
}

#[test]
fn host_functions_are_typed_and_bounded() {
    if !kvm() {
        return;
    }
    let builder = Sandbox::builder().host_function("sum", |a: u64, b: u32| a + u64::from(b));
    let mut sandbox = builder.build(elf()).unwrap();
    let input = sandbox.heap().start + 20 * 4096;
    let call = |sandbox: &mut Sandbox, bytes: &[u8], capacity: u64| {
        sandbox.write_memory(input, bytes).unwrap();
        let len = bytes.len() as u64;
        let output = sandbox.run(&words(&[7, 6, 0, input, len, input + 4096, capacity])).unwrap();
        i64::from_le_bytes(output.try_into().unwrap())
    };
    let mut good = 40_u64.to_le_bytes().to_vec();
    good.extend(2_u32.to_le_bytes());
    assert_eq!(call(&mut sandbox, &good, 8), 8);
    assert_eq!(call(&mut sandbox, &good, 7), -4, "the result does not fit");
    assert_eq!(call(&mut sandbox, &good[..11], 8), -2, "an argument is cut");
    good.push(0);
    assert_eq!(call(&mut sandbox, &good, 8), -2, "there is one byte too many");
    let unknown = sandbox.run(&words(&[7, 6, 5, input, 0, input, 0])).unwrap();
    assert_eq!(unknown, (-1_i64).to_le_bytes());
    let outside = sandbox.run(&words(&[7, 6, 0, input, 12, 8, 8])).unwrap_err();
    assert!(
        matches!(outside, CallError::Guest(GuestError::BadPointer { call: 6, .. })),
        "{outside}"
    );
}

#[test]
fn regions_are_what_they_say() {
    if !kvm() {
        return;
    }
    let shared = std::sync::Arc::new(afresh_vm::SharedMemory::new(8192).unwrap());
    let builder = Sandbox::builder()
        .read_only(b"constant".to_vec())
        .gap(4096)
        .shared(shared.clone())
        .read_write(8192);
    let mut sandbox = builder.build(elf()).unwrap();
    let regions = sandbox.regions();
    let [constant, gap, common, writable] = regions[..] else { panic!("four regions") };

    assert_eq!(sandbox.run(&words(&[5, constant.start])).unwrap(), b"c");
    assert!(sandbox.run(&words(&[4, constant.start, 1])).is_err(), "read-only");
    assert!(sandbox.run(&words(&[5, gap.start])).is_err(), "a gap");
    sandbox.call(&words(&[4, writable.start, 5])).unwrap();
    assert_eq!(sandbox.call(&words(&[5, writable.start])).unwrap(), [5]);
    sandbox.reset().unwrap();
    assert_eq!(sandbox.run(&words(&[5, writable.start])).unwrap(), [0]);

    assert!(shared.write(100, &[9]));
    assert_eq!(sandbox.run(&words(&[5, common.start + 100])).unwrap(), [9]);
    sandbox.run(&words(&[4, common.start + 200, 0x1234])).unwrap();
    let mut seen = [0; 2];
    assert!(shared.read(200, &mut seen));
    assert_eq!(seen, [0x34, 0x12], "shared memory is not reset");
    let mut other = sandbox.pristine().fork().unwrap();
    assert_eq!(other.run(&words(&[5, common.start + 200])).unwrap(), [0x34]);

    let error = sandbox.write_memory(constant.start, b"x").unwrap_err();
    assert!(matches!(error, AccessError { write: true, .. }));
    assert!(sandbox.write_memory(gap.start, b"x").is_err());
    sandbox.verify().unwrap();
}

#[test]
fn both_sides_state_the_same_interface() {
    let read = |path: &str| {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(root.join(path)).unwrap()
    };
    let constants = |text: String| -> std::collections::BTreeMap<String, String> {
        text.lines()
            .filter_map(|line| line.trim().strip_prefix("pub const "))
            .filter_map(|line| line.split_once(':'))
            .filter_map(|(name, rest)| Some((name.to_owned(), rest.split_once('=')?.1.to_owned())))
            .collect()
    };
    // The Rust kit uses the crate that the host uses.
    let host = constants(read("../vm-abi/src/lib.rs"));
    assert!(host.len() >= 15);
    let header = read("../../guests/vm/include/afresh.h");
    for (name, value) in &host {
        let value = value.trim().trim_end_matches(';');
        let stated = header.lines().filter(|line| line.contains(&format!("AFRESH_{name} ")));
        let numeric = name.starts_with("CALL_") || name.starts_with("ERR_") || name == "PORT";
        assert!(
            !numeric || stated.into_iter().any(|line| line.contains(value)),
            "{name} = {value}"
        );
    }
}

#[test]
fn a_missing_or_foreign_thing_is_named() {
    if !kvm() {
        return;
    }
    let mut one = Sandbox::builder().build(elf()).unwrap();
    let two = Sandbox::builder().build(elf()).unwrap();
    assert!(matches!(one.restore(&two.pristine()), Err(CallError::ForeignSnapshot)));
    let large = vec![0; 70_000];
    assert!(matches!(one.run(&large), Err(CallError::InputTooLarge { capacity: 65536, .. })));
    let small = Sandbox::builder().memory(256 << 10).input(512 << 10).build(elf());
    assert!(small.unwrap_err().to_string().contains("too small"));
}

#[test]
fn host_memory_and_objects_of_a_guest_are_limited() {
    if !kvm() {
        return;
    }
    let limited =
        |sandbox: &mut Sandbox, input: &[u64], what: &str| match sandbox.run(&words(input)) {
            Err(CallError::Guest(error @ GuestError::OverLimit { .. })) => {
                assert!(error.to_string().contains(what), "{error}");
            }
            other => panic!("{what}: {other:?}"),
        };
    let builder = || Sandbox::builder().memory(8 << 20);
    let mut sandbox = builder().output(5000).arguments(4000).random(3000).build(elf()).unwrap();
    let heap = sandbox.heap().start;
    assert_eq!(sandbox.run(&words(&[3, 5000])).unwrap().len(), 5000);
    limited(&mut sandbox, &[3, 5001], "SandboxBuilder::output");
    limited(&mut sandbox, &[7, 2, 0, heap, 5001], "SandboxBuilder::output");
    limited(&mut sandbox, &[7, 2, 9, heap, 5001], "SandboxBuilder::output");
    assert_eq!(sandbox.run(&words(&[7, 7, heap + (1 << 20), 3000])).unwrap(), [0; 8]);
    limited(&mut sandbox, &[7, 7, heap + (1 << 20), 3001], "SandboxBuilder::random");
    sandbox.verify().unwrap();

    let builder = || builder().host_function("len", |bytes: Vec<u8>| bytes.len() as u64);
    let mut sandbox = builder().arguments(4000).build(elf()).unwrap();
    let heap = sandbox.heap().start + (1 << 20);
    let call = |len: u64| [7, 6, 0, heap, len, heap, 8];
    // Four zero bytes are an empty list, so that the rest is one argument too many.
    assert_eq!(sandbox.run(&words(&call(4000))).unwrap(), (-2_i64).to_le_bytes());
    limited(&mut sandbox, &call(4001), "SandboxBuilder::arguments");
    // Beyond guest memory it is a bad pointer, for every limit.
    let error = sandbox.run(&words(&call(1 << 40))).unwrap_err();
    assert!(matches!(error, CallError::Guest(GuestError::BadPointer { .. })), "{error}");
    sandbox.verify().unwrap();
}

#[test]
fn a_time_limit_holds_inside_a_hypercall() {
    if !kvm() {
        return;
    }
    const LEN: u64 = 900 << 20;
    let limit = std::time::Duration::from_millis(50);
    let builder = Sandbox::builder().memory(1 << 30).random(u64::MAX).output(u64::MAX);
    let mut sandbox = builder.timeout(limit).build(elf()).unwrap();
    let heap = sandbox.heap().start + (1 << 20);
    // Randomness of 900 MiB takes seconds.
    let started = std::time::Instant::now();
    let error = sandbox.run(&words(&[7, 7, heap, LEN])).unwrap_err();
    assert!(matches!(error, CallError::Guest(GuestError::Timeout { .. })), "{error}");
    assert!(started.elapsed() < limit * 20, "{:?}", started.elapsed());
    sandbox.verify().unwrap();
}
