//! Time to a micro-VM's first answer from a snapshot file in the page cache, lazily and read whole:
//! `restore DIRTY.elf [MIB…]`, one JSON object a line. The guest is the `dirty` sample, whose heap
//! is filled with random bytes; the answer takes 16 pages of it.

use std::error::Error;
use std::time::{Duration, Instant};

use afresh_pager::Options;
use afresh_store::Store;
use afresh_vm::{Frozen, Sandbox, SnapshotMemory, SnapshotOptions};

/// Rounds of each way; the median is shown.
const ROUNDS: usize = 5;
/// Bytes of the heap that the guest's allocator works in.
const RESERVED: u64 = 16 * 4096;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let guest = arguments.next().ok_or("usage: restore DIRTY.elf [MIB…]")?;
    let elf = std::fs::read(guest)?;
    let mut sizes = arguments.map(|mib| mib.parse()).collect::<Result<Vec<u64>, _>>()?;
    if sizes.is_empty() {
        sizes.push(256);
    }
    sizes.into_iter().try_for_each(|mib| measure(&elf, mib))
}

/// The input that sums a word of 16 pages, and its answer in the filled guest.
fn input(pages: u64) -> Vec<u8> {
    [2, 1, 16, pages / 20].iter().flat_map(|word: &u64| word.to_le_bytes()).collect()
}

fn measure(elf: &[u8], mib: u64) -> Outcome<()> {
    let dir = tempfile::tempdir()?;
    let store = Store::create(dir.path())?;
    let mut sandbox = Sandbox::builder().memory(mib << 20).build(elf)?;
    let heap = sandbox.heap();
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = vec![0; 1 << 20];
    let mut at = heap.start + RESERVED;
    while at < heap.end() {
        for word in bytes.chunks_exact_mut(8) {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            word.copy_from_slice(&seed.to_le_bytes());
        }
        let len = bytes.len().min((heap.end() - at) as usize);
        sandbox.write_memory(at, &bytes[..len])?;
        at += len as u64;
    }
    let input = input((heap.len - RESERVED) / 4096);
    let expected = sandbox.checkpoint()?;
    let answer = sandbox.run(&input)?;
    expected.freeze()?.save(&store, "a", &SnapshotOptions::default())?;
    drop((sandbox, expected));

    type Restore = fn(&Store) -> Outcome<Frozen>;
    let ways: [(&str, Restore); 3] = [
        ("lazy", |store| Ok(Frozen::load(store.load("a")?, &Options::default())?)),
        ("streamed-first", |store| {
            let frozen = Frozen::load(store.load("a")?, &Options::default())?;
            frozen.memory().wait(Duration::from_secs(60))?;
            Ok(frozen)
        }),
        ("whole", |store| {
            let snapshot = store.load("a")?;
            let memory = SnapshotMemory::from(snapshot.to_image()?);
            Ok(Frozen::from_parts(memory, snapshot.state())?)
        }),
    ];
    let mut times = [const { Vec::new() }; 3];
    let mut calls = [const { Vec::new() }; 3];
    for _ in 0..ROUNDS {
        for (index, (name, load)) in ways.iter().enumerate() {
            let started = Instant::now();
            let frozen = load(&store)?;
            let mut thawed = Sandbox::builder().thaw(&frozen)?;
            let before = started.elapsed();
            if thawed.call(&input)? != answer {
                return Err(format!("{name}: another answer than the frozen guest's").into());
            }
            let total = started.elapsed();
            times[index].push(total);
            calls[index].push(total - before);
            frozen.memory().wait(Duration::from_secs(60))?;
        }
    }
    for (index, (name, _)) in ways.iter().enumerate() {
        times[index].sort_unstable();
        calls[index].sort_unstable();
        let micros = |times: &[Duration]| times[ROUNDS / 2].as_micros();
        println!(
            "{{\"mib\":{mib},\"way\":\"{name}\",\"first_answer_us\":{},\"call_us\":{}}}",
            micros(&times[index]),
            micros(&calls[index])
        );
    }
    Ok(())
}
