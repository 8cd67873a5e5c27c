//! The documents of a saved tree.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::Refused;
use crate::nodes::content::PAGE;
use crate::nodes::node::{Kind, Times};

/// The form of a tree without extended attributes.
pub(super) const FORM: u32 = 1;
/// The form of a tree with extended attributes, which follow the description.
pub(super) const FORM_WITH_ATTRIBUTES: u32 = 2;
/// The form of a tree over host directories: attributes, and inode numbers behind them.
pub(super) const FORM_WITH_NUMBERS: u32 = 3;
/// The form of a tree with recorded owners: attributes, inode numbers if they are stored, and the
/// owners behind them.
pub(super) const FORM_WITH_OWNERS: u32 = 4;

/// The bytes are not a tree, or not one over these layers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TreeError {
    /// They are damaged, or hostile.
    #[error("the saved file tree is damaged: {0}")]
    Damaged(String),
    /// The saved tree was over other layers.
    #[error(
        "the saved file tree was over {expected}, and these layers are {found}; give it the same, in order"
    )]
    Layers {
        /// The layers when it was saved.
        expected: String,
        /// The layers given now.
        found: String,
    },
    /// A layer could not be read.
    #[error(transparent)]
    Layer(#[from] Refused),
    /// It takes more memory than a saved tree may, or would when it is read again.
    #[error("the saved file tree has too many files or names: {0}")]
    Exceeded(#[from] afresh_budget::BudgetExceeded),
}

/// A tree as bytes: its description, and the pages of its files, in an order that the description
/// knows.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SavedTree {
    /// Everything but the pages.
    pub description: Vec<u8>,
    /// The pages, of 4096 bytes or less; the missing rest of one is zeros.
    pub pages: Vec<Arc<Vec<u8>>>,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct SavedDescription {
    pub(super) form: u32,
    pub(super) budget: (u64, u64),
    pub(super) next: u64,
    pub(super) layers: Vec<String>,
    /// Numbers of hosts' files, and their paths below their directories.
    pub(super) hosts: Vec<(u64, Vec<u8>)>,
    pub(super) nodes: Vec<(u64, SavedNode)>,
    /// Numbers of removed files of layers.
    pub(super) gone: Vec<u64>,
    pub(super) held: Vec<(u64, u32)>,
    pub(super) pages: u64,
}

/// Extended attributes by file, in the order of the numbers.
pub(super) type SavedAttributes = Vec<(u64, Vec<(Vec<u8>, Vec<u8>)>)>;

/// Inode numbers of host files, in the order of the nodes.
pub(super) type SavedNumbers = Vec<(u64, u64)>;

/// Recorded users and groups of files, in the order of the nodes.
pub(super) type SavedOwners = Vec<(u64, [u32; 2])>;

impl SavedDescription {
    /// The files of layers alone.
    pub(crate) fn of_layers(next: u64, nodes: Vec<(u64, SavedNode)>) -> Self {
        let (layers, hosts, gone, held) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { form: FORM, budget: (0, 0), next, layers, hosts, nodes, gone, held, pages: 0 }
    }
}

#[derive(Serialize, Deserialize)]
pub(crate) struct SavedNode {
    pub(super) mode: u32,
    pub(super) times: Times,
    pub(super) paid: bool,
    pub(super) body: SavedBody,
}

#[derive(Serialize, Deserialize)]
pub(super) enum SavedBody {
    File {
        size: u64,
        /// Number in the file, and length; in the order of the pages.
        pages: Vec<(u64, u32)>,
        /// And how many bytes of it count.
        under: Option<(SavedSource, u64)>,
    },
    Directory {
        parent: u64,
        /// The differences from the layers.
        entries: Vec<SavedEntry>,
    },
    Link(Vec<u8>),
    Device(u64),
}

#[derive(Serialize, Deserialize)]
pub(crate) enum SavedSource {
    Host(u64),
    Archive(u32, u32),
}

/// A name, and its target: the number of a file, its kind, and whether the name was paid for.
pub(crate) type SavedEntry = (Vec<u8>, Option<(u64, Kind, bool)>);

pub(crate) fn damaged(why: impl Into<String>) -> TreeError {
    TreeError::Damaged(why.into())
}

impl SavedTree {
    /// Puts one together that was kept apart.
    #[must_use]
    pub fn new(description: Vec<u8>, pages: Vec<Arc<Vec<u8>>>) -> Self {
        Self { description, pages }
    }

    /// Both in one, for a file or a message.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let pages: usize = self.pages.iter().map(|page| page.len() + 4).sum();
        let mut bytes = Vec::with_capacity(8 + self.description.len() + pages);
        bytes.extend((self.description.len() as u64).to_le_bytes());
        bytes.extend(&self.description);
        for page in &self.pages {
            bytes.extend((page.len() as u32).to_le_bytes());
            bytes.extend(&**page);
        }
        bytes
    }

    /// The way back.
    ///
    /// # Errors
    /// [`TreeError::Damaged`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, TreeError> {
        let short = || damaged("it ends in the middle");
        let (len, rest) = bytes.split_first_chunk::<8>().ok_or_else(short)?;
        let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| short())?;
        let (description, mut rest) = rest.split_at_checked(len).ok_or_else(short)?;
        let mut pages = Vec::new();
        while let Some((len, after)) = rest.split_first_chunk::<4>() {
            let len = u32::from_le_bytes(*len) as usize;
            if len > PAGE {
                return Err(damaged("a page is too long"));
            }
            let (page, after) = after.split_at_checked(len).ok_or_else(short)?;
            pages.push(Arc::new(page.to_vec()));
            rest = after;
        }
        match rest {
            [] => Ok(Self { description: description.to_vec(), pages }),
            _ => Err(short()),
        }
    }
}
