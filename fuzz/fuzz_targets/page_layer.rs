//! Any bytes as a page layer: it is refused, or every page it claims can be read or is refused.
//! Under `cfg(fuzzing)` digests are not compared, so that the code behind them is reached.
//! It takes memory in proportion to its bytes.
#![no_main]

use std::io;

use afresh_budget::meter::{Meter, within};
use afresh_fuzz::accepted;
use afresh_store::{BlobRead, Layer, Sha256};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

/// Bytes of memory for a byte of the layer: an index is compressed.
const EACH: usize = 64;
/// Memory for buffers and messages.
const ROOM: usize = 1 << 20;

struct Bytes(Vec<u8>);

impl BlobRead for Bytes {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        let from = usize::try_from(offset).map_err(io::Error::other)?;
        let end = from.checked_add(out.len()).filter(|end| *end <= self.0.len());
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(&self.0[from..end]);
        Ok(())
    }
}

fuzz_target!(|data: &[u8]| {
    // Of each of the layers, with its pages and buffers of this target.
    within(4 * data.len() * EACH + 4 * ROOM, || check(data));
});

fn check(data: &[u8]) {
    // Pages are long and uninteresting: the input is the tail, after as many pages of zeros as its
    // first byte gives.
    let Some((pages, tail)) = data.split_first() else { return };
    let mut blob = vec![0; usize::from(*pages % 8) * 4096];
    blob.extend_from_slice(tail);
    let size = blob.len() as u64;
    let open =
        |blob: Vec<u8>| Layer::from_blob(Box::new(Bytes(blob)), Sha256([0; 32]), size, &[0; 32]);
    // Twice, because a checked page is read in another way afterwards.
    let Some(layer) = accepted(open(blob.clone())) else { return };
    let Ok(fresh) = open(blob) else { return };
    let mut page = [0; 4096];
    for stored in (0..layer.stored().min(64)).chain([layer.stored().wrapping_sub(1)]) {
        let _ = layer.read(stored, &mut page);
    }
    let _ = layer.verify(0, layer.stored());
    let mut some = vec![0; 4096 * layer.stored().min(64) as usize];
    let half = some.len() / 8192 * 4096;
    for layer in [&layer, &fresh] {
        let _ = accepted(layer.read(0, &mut some));
        let _ = layer.read(layer.stored() / 2, &mut some[..half]);
    }
    let _ = fresh.check(&mut |_| {});
}
