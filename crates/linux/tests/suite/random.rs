//! A running guest keeps the limits that a snapshot is checked for: its own snapshot always opens.

use std::time::Duration;

use afresh_linux::{Program, Warm};

use crate::common;
use crate::common::states::ask;

const ROUNDS: u64 = 36;
/// Rounds that continue from the snapshot of the one before.
const ROW: u64 = 6;

#[test]
fn after_random_calls_the_snapshot_of_a_guest_opens() {
    let Some(path) = common::compiled("random.c", &["-static"]) else { return };
    let program = Program::new(path).memory_limit(40 << 20).storage_limit(4 << 20);
    let program = program.time_limit(Duration::from_secs(60)).start_limit(Duration::from_secs(60));
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    for seed in 0..ROUNDS {
        if seed % ROW == 0 {
            instance = warm.instance();
        }
        let done = ask(&mut instance, &format!("{seed} 300")).parse::<u32>().unwrap();
        assert!(done > 50, "{seed}: {done} calls");
        let frozen = instance.freeze().unwrap_or_else(|error| panic!("{seed}: {error}"));
        let thawed = Warm::thaw(&frozen, &program);
        instance = thawed.unwrap_or_else(|error| panic!("{seed}: {error}")).instance();
    }
}
