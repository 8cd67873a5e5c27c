//! Call and restore, creation, and snapshots by heap size: Hyperlight and afresh, in turns.
//!
//! `rival-hyperlight HYPERLIGHT_GUEST AFRESH_GUEST`, the second being the `dirty` sample; one JSON
//! object a line.

use std::error::Error;
use std::time::Instant;

use afresh_vm::Sandbox;
use hyperlight_host::SandboxBuilder;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Heap in MiB (0 is each side's default) and Hyperlight's scratch memory in bytes.
const HEAPS: [(u64, Option<usize>); 4] =
    [(0, None), (8, Some(0x80000)), (64, Some(0x200000)), (256, Some(0x400000))];

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn report(case: &str, strategy: &str, mut samples: Vec<f64>) {
    samples.sort_by(f64::total_cmp);
    let at = |share: usize| samples[(samples.len() * share / 100).min(samples.len() - 1)];
    println!(
        "{{\"table\":\"vm-rival\",\"case\":\"{case}\",\"strategy\":\"{strategy}\",\"threads\":1,\
         \"median\":{:.3},\"min\":{:.3},\"p99\":{:.3},\"unit\":\"us\"}}",
        at(50),
        samples[0],
        at(99)
    );
}

fn micros(work: impl FnOnce() -> Outcome<()>) -> Outcome<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_nanos() as f64 / 1e3)
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: rival-hyperlight HYPERLIGHT_GUEST AFRESH_GUEST";
    let theirs = arguments.next().ok_or(usage)?;
    let ours = std::fs::read(arguments.next().ok_or(usage)?)?;
    for (heap, scratch) in HEAPS {
        let name = if heap == 0 { "default".to_owned() } else { format!("{heap}MiB") };
        let their_builder = || {
            let mut builder = SandboxBuilder::from_file(&theirs);
            if heap > 0 {
                builder = builder.heap_size(heap << 20);
            }
            if let Some(scratch) = scratch {
                builder = builder.scratch_size(scratch);
            }
            builder
        };
        let our_builder = || {
            let builder = Sandbox::builder();
            if heap == 0 { builder } else { builder.memory((heap << 20) + (1 << 20)) }
        };

        let (mut their_times, mut our_times) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            their_times.push(micros(|| {
                their_builder().build()?.call::<i32>("Dirty", 0_i32)?;
                Ok(())
            })?);
            our_times.push(micros(|| {
                our_builder().build(&ours)?.call(&words(&[1, 0, 0, 1, 1]))?;
                Ok(())
            })?);
        }
        report(&format!("create-{name}"), "hyperlight", their_times);
        report(&format!("create-{name}"), "afresh", our_times);

        let mut their = their_builder().build()?;
        let mut our = our_builder().build(&ours)?;
        let their_snapshot = their.snapshot()?;
        for pages in [0, 4] {
            let input = words(&[1, 0, pages, 1, 1]);
            let (mut their_call, mut their_reset) = (Vec::new(), Vec::new());
            let (mut our_call, mut our_reset) = (Vec::new(), Vec::new());
            for round in 0..25 {
                let call = micros(|| {
                    their.call::<i32>("Dirty", pages as i32)?;
                    Ok(())
                })?;
                let reset = micros(|| Ok(their.restore(their_snapshot.clone())?))?;
                if round >= 10 {
                    their_call.push(call);
                    their_reset.push(reset);
                }
            }
            for round in 0..1000 {
                let call = micros(|| {
                    our.call(&input)?;
                    Ok(())
                })?;
                let reset = micros(|| {
                    our.reset()?;
                    Ok(())
                })?;
                if round >= 10 {
                    our_call.push(call);
                    our_reset.push(reset);
                }
            }
            our.verify()?;
            report(&format!("call-{name}/{pages}"), "hyperlight", their_call);
            report(&format!("call-{name}/{pages}"), "afresh", our_call);
            report(&format!("restore-{name}/{pages}"), "hyperlight", their_reset);
            report(&format!("restore-{name}/{pages}"), "afresh", our_reset);
        }

        let (mut their_times, mut our_times) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            their.call::<i32>("Dirty", 4_i32)?;
            their_times.push(micros(|| {
                their.snapshot()?;
                Ok(())
            })?);
            our.call(&words(&[1, 0, 4, 1, 1]))?;
            our_times.push(micros(|| {
                our.snapshot()?;
                Ok(())
            })?);
            our.reset()?;
            their.restore(their_snapshot.clone())?;
        }
        report(&format!("snapshot-{name}"), "hyperlight", their_times);
        report(&format!("snapshot-{name}"), "afresh", our_times);
    }
    Ok(())
}
