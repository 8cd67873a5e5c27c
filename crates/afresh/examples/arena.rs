//! An arena: memory of this process's own for one request after another, zero at every start,
//! without a page fault.
//!
//! `cargo run -p afresh --features arena --example arena`

use afresh::arena::{ArenaOptions, Region};
use afresh::frames::{Pool, PoolOptions};

/// Handles requests in one region; returns how many bytes each used.
pub(crate) fn requests(count: u8) -> Result<Vec<usize>, Box<dyn std::error::Error>> {
    let pool = Pool::new(PoolOptions::new(8192))?; // at most 32 MiB of physical memory
    let mut region = Region::new(pool, ArenaOptions::committed(4096))?; // up to 16 MiB of addresses
    let mut used = Vec::new();
    for request in 1..=count {
        let scratch = region.bytes(64 << 10).ok_or("the region is full")?;
        if scratch.iter().any(|byte| *byte != 0) {
            return Err("the last request left something".into());
        }
        scratch.fill(request);
        used.push(region.used());
        region.reset()?;
    }
    Ok(used)
}

#[allow(dead_code, reason = "the tests call what it calls")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let used = requests(100)?;
    println!("{} requests, the largest used {} bytes", used.len(), used.iter().max().unwrap_or(&0));
    Ok(())
}
