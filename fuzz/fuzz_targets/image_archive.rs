//! Any bytes as an archive of files: what `docker save` writes, a tar, a zip. It is refused, or a
//! tree of files. It takes memory in proportion to its bytes and to the limits on its content.
//!
//! The first byte of an input chooses the kind. The checksums of tar headers, which a fuzzer cannot
//! guess, are filled in. A file whose kind is a capital letter is as it is, and may be compressed.
#![no_main]

use std::fs;
use std::path::Path;

use afresh_budget::meter::{Meter, within};
use afresh_files::{Budget, Layer, LayerError, OciImage, Tree};
use afresh_fuzz::layers::{LIMITS, memory, read_files};
use afresh_fuzz::{BLOCK, accepted, expand, sum_headers};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Meter = Meter;

fn read(kind: u8, path: &Path) -> Result<Tree, LayerError> {
    let layer = match kind {
        b'd' | b'D' => {
            let image = OciImage::open(path, None, &LIMITS)?;
            return Tree::new(Budget::default()).with_layer("/", image.layer());
        }
        b'z' => Layer::zip(path, &LIMITS)?,
        b't' | b'T' => Layer::tar(path, &LIMITS)?,
        _ => Layer::open(path, &LIMITS)?,
    };
    Tree::new(Budget::default()).with_layer("/", &layer)
}

fuzz_target!(|data: &[u8]| {
    let Some((kind, data)) = data.split_first() else { return };
    let file = match kind {
        b'd' | b't' => {
            let mut file = expand(data);
            sum_headers(&mut file);
            file.extend_from_slice(&[0; 2 * BLOCK]);
            file
        }
        _ => data.to_vec(),
    };
    let Ok(dir) = tempfile::tempdir() else { return };
    let path = dir.path().join("a");
    if fs::write(&path, &file).is_err() {
        return;
    }
    let (tree, _) = within(memory(file.len()), || read(*kind, &path));
    if let Some(tree) = accepted(tree) {
        read_files(&tree);
    }
});
