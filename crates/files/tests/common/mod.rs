//! Layers kept as a saver keeps them.

use std::sync::Arc;

use afresh_files::{Budget, LayerBytes, Refused, Tree, TreeError};

/// Pages that were kept.
#[derive(Debug)]
pub(crate) struct Pages(pub(crate) Vec<u8>);

impl LayerBytes for Pages {
    fn read_at(&self, at: u64, out: &mut [u8]) -> Result<(), String> {
        let part = self.0.get(at as usize..at as usize + out.len());
        out.copy_from_slice(part.ok_or("it lies outside")?);
        Ok(())
    }
}

/// Layers as a saver keeps them.
pub(crate) struct LayerStore {
    pub(crate) description: Vec<u8>,
    pub(crate) pages: u64,
    pub(crate) bytes: Vec<u8>,
}

impl LayerStore {
    pub(crate) fn new(tree: &Tree) -> Self {
        let kept = tree.stored_layers().unwrap();
        let mut bytes = vec![0; kept.pages() as usize * 4096];
        kept.read(|page, part| {
            bytes[page as usize * 4096..][..part.len()].copy_from_slice(part);
            Ok::<_, Refused>(())
        })
        .unwrap();
        let shared: Arc<dyn LayerBytes> = Arc::new(Pages(bytes.clone()));
        assert!(kept.settle(&shared));
        Self { description: kept.description().to_vec(), pages: kept.pages(), bytes }
    }

    pub(crate) fn open(&self, description: &[u8]) -> Result<Tree, TreeError> {
        let bytes: Arc<dyn LayerBytes> = Arc::new(Pages(self.bytes.clone()));
        Tree::with_stored_layers(Budget::default(), description, self.pages, &bytes)
    }

    /// A tree as it comes back over them.
    pub(crate) fn tree(&self, tree: &Tree) -> Tree {
        let saved = tree.capture_host_directories().unwrap().saved().unwrap();
        self.open(&self.description).unwrap().restored(&saved).unwrap()
    }
}
