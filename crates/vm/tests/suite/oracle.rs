//! Random programs against a naive oracle: a copy of all memory, taken once, compared whole.

use std::sync::OnceLock;

use crate::common::{guest, kvm, words};
use afresh_vm::{ResetMethod, Sandbox};
use proptest::prelude::*;

const PAGE: u64 = 4096;
/// Pages of the heap that the programs use.
const PAGES: u64 = 400;

#[derive(Debug, Clone)]
enum Step {
    Guest { first: u64, count: u64, stride: u64, value: u64 },
    Host { offset: u64, len: usize },
    Crash,
    Reset,
    Restore,
}

fn step() -> impl Strategy_<Value = Step> {
    prop_oneof![
        6 => (0..PAGES, 1..60_u64, 1..9_u64, any::<u64>()).prop_map(|(first, count, stride, value)| {
            let count = count.min((PAGES - first).div_ceil(stride));
            Step::Guest { first, count, stride, value }
        }),
        3 => (0..PAGES * PAGE - 9000, 1..9000_usize).prop_map(|(offset, len)| Step::Host { offset, len }),
        1 => Just(Step::Crash),
        5 => Just(Step::Reset),
        1 => Just(Step::Restore),
    ]
}

use proptest::strategy::Strategy as Strategy_;

fn elf() -> &'static [u8] {
    static ELF: OnceLock<Vec<u8>> = OnceLock::new();
    ELF.get_or_init(|| guest("dirty"))
}

fn content(sandbox: &Sandbox) -> Vec<u8> {
    let heap = sandbox.heap();
    let mut bytes = vec![0; heap.len as usize];
    sandbox.read_memory(heap.start, &mut bytes).unwrap();
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn after_any_program_a_reset_leaves_what_was_there_before(
        steps in proptest::collection::vec(step(), 1..40),
        method in proptest::sample::select(ResetMethod::ALL.to_vec()),
    ) {
        if !kvm() {
            return Ok(());
        }
        let builder = Sandbox::builder().memory(2 << 20).reset_method(method);
        let mut sandbox = builder.build(elf()).unwrap();
        let base = sandbox.pristine();
        let heap = sandbox.heap();
        let oracle = content(&sandbox);
        let mut failed = false;
        for step in steps.into_iter().chain([Step::Reset]) {
            match step {
                Step::Guest { first, count, stride, value } if !failed => {
                    sandbox.call(&words(&[1, first, count, stride, value])).unwrap();
                    let sum = sandbox.call(&words(&[2, first, count, stride])).unwrap();
                    prop_assert_eq!(sum, value.wrapping_mul(count).to_le_bytes());
                }
                Step::Host { offset, len } => {
                    sandbox.write_memory(heap.start + 16 * PAGE + offset, &vec![0x77; len]).unwrap();
                }
                Step::Crash if !failed => {
                    prop_assert!(sandbox.call(&words(&[4, 8, 1])).is_err());
                    failed = true;
                }
                Step::Reset => {
                    sandbox.reset().unwrap();
                    failed = false;
                    prop_assert!(content(&sandbox) == oracle, "{:?}", method);
                    if let Err(error) = sandbox.verify() {
                        return Err(TestCaseError::fail(format!("{method:?}: {error}")));
                    }
                }
                Step::Restore => {
                    sandbox.restore(&base).unwrap();
                    failed = false;
                    prop_assert!(content(&sandbox) == oracle, "{:?}", method);
                }
                _ => {}
            }
        }
    }
}
