//! The suites in one program, because each that links wasmtime takes long to build.

use afresh_proof::differential::Bench;
use afresh_proof::spec;
use afresh_sys::planted::{self, Bug};

#[test]
fn every_assertion_of_the_specification_holds_again_after_a_reset() {
    let counts = spec::run(spec::Extent { thaw_every: 8, only: None }).unwrap();
    println!("{counts}");
    assert!(counts.assertions > 40_000, "{counts}");
    assert!(counts.unmet * 100 < counts.assertions, "{counts}");
    assert!(counts.reset > 1000 && counts.fresh > 1000, "{counts}");
    assert!(counts.compared > 8 * counts.calls, "{counts}");
}

#[test]
fn random_modules_with_state_do_what_new_instances_of_plain_wasmtime_do() {
    let mut bench = Bench::new().unwrap();
    for seed in 0..250 {
        if let Err(error) = bench.check(seed) {
            panic!("seed {seed}: {error:#}\n{}", afresh_proof::differential::module(seed));
        }
    }
    let seen = bench.seen;
    println!("{seen:#?}");
    assert!(seen.reset > 80 && seen.fresh > 50 && seen.thawed > 100, "{seen:#?}");
    assert!(seen.calls > 20_000 && seen.traps > 1000 && seen.thrown > 15, "{seen:#?}");
    assert!(seen.meddled > 100 && seen.clean > 100 && seen.seen_to_differ > 200, "{seen:#?}");
    assert!(seen.kept > 5, "{seen:#?}");
    assert!(seen.replaced > 50 && seen.shrunk > 50, "{seen:#?}");
}

#[test]
fn planted_bugs_are_caught() {
    let random = ["random_modules_with_state_do_what_new_instances_of_plain_wasmtime_do"];
    planted::must_be_caught(&[Bug::CopyBack, Bug::Learn, Bug::GrownSize, Bug::Freeze], &random);
    planted::must_be_caught(&[Bug::Global, Bug::Element, Bug::Segment, Bug::Thaw], &random);
    planted::must_be_caught(&[Bug::Replace, Bug::View, Bug::Bake, Bug::HostState], &random);
}
