//! The common part of all archives: a list of items, and bytes that are read on demand.

use std::fs::File;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::UNIX_EPOCH;

use afresh_budget::{Budget, Charge};
use sha2::{Digest, Sha256};

use crate::error::{LayerError, Refused};
use crate::layers::host::HostDirectory;
use crate::layers::item::{EntryKind, Item, LayerLimits};
use crate::layers::layer_bytes::LayerBytes;
use crate::layers::packed::{PackedFile, PackedZip};
use crate::layers::regular_file::open_regular;
use crate::nodes::node::{Node, Time};
use crate::nodes::source::SourceVersion;
use crate::read_at::FileExt;

/// Where an archive's file has its bytes.
#[derive(Debug)]
pub(crate) enum StoredFile {
    /// As they are, from an offset of the archive on, and how many.
    Plain(u64, u64),
    /// In a zip, to be unpacked by the first read.
    Packed(PackedFile),
    /// Offset and length in the stored bytes.
    Kept(u64, u64),
}

impl StoredFile {
    /// Length of the file.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Plain(_, len) | Self::Kept(_, len) => *len,
            Self::Packed(file) => file.len(),
        }
    }
}

/// The source of archive bytes.
#[derive(Debug)]
enum Data {
    File(File),
    Kept(Arc<dyn LayerBytes>),
    /// A host directory that was captured, and its files by their numbers here.
    Host(Arc<HostDirectory>, Vec<Node>),
}

/// An archive: a zip, a tar, one layer of an image.
#[derive(Debug)]
pub(crate) struct Archive {
    /// Its name in errors.
    pub(crate) name: String,
    pub(crate) items: Vec<Item>,
    pub(crate) files: Vec<StoredFile>,
    data: Data,
    pub(crate) packed: Option<PackedZip>,
    /// Maximum number of files and directories that it makes.
    pub(crate) max_nodes: u64,
    /// The memory of `items`.
    _charge: Option<Charge>,
    /// The identity that its owner gave it.
    pub(crate) known_as: Option<String>,
    /// The identity of this archive.
    identity: OnceLock<String>,
}

impl Archive {
    pub(crate) fn new(
        name: String,
        items: Vec<Item>,
        files: Vec<StoredFile>,
        data: File,
        packed: Option<PackedZip>,
        counter: Counter,
    ) -> Self {
        Self {
            items,
            packed,
            max_nodes: counter.limits.files,
            _charge: Some(counter.charge),
            ..Self::without_items(name, files, Data::File(data), OnceLock::new())
        }
    }

    /// One that was kept. Its names are in the tree already.
    pub(crate) fn from_store(
        identity: String,
        files: Vec<StoredFile>,
        bytes: Arc<dyn LayerBytes>,
    ) -> Self {
        let name = identity.clone();
        Self::without_items(name, files, Data::Kept(bytes), OnceLock::from(identity))
    }

    /// A host directory with all its known files, whose names are already in a tree.
    pub(crate) fn captured(
        host: Arc<HostDirectory>,
        nodes: Vec<Node>,
        files: Vec<StoredFile>,
    ) -> Self {
        let name = host.path.display().to_string();
        let identity = OnceLock::from(host.identity().to_owned());
        Self::without_items(name, files, Data::Host(host, nodes), identity)
    }

    fn without_items(
        name: String,
        files: Vec<StoredFile>,
        data: Data,
        identity: OnceLock<String>,
    ) -> Self {
        let (items, packed, max_nodes, charge) = (Vec::new(), None, 0, None);
        Self {
            name,
            items,
            files,
            data,
            packed,
            max_nodes,
            _charge: charge,
            known_as: None,
            identity,
        }
    }

    /// The host directory that it is, and its files by their numbers here.
    pub(crate) fn host(&self) -> Option<(&HostDirectory, &[Node])> {
        match &self.data {
            Data::Host(host, nodes) => Some((host, nodes)),
            Data::File(_) | Data::Kept(_) => None,
        }
    }

    /// A single file, as it is, under a name.
    pub(crate) fn file(path: &Path, name: &[u8]) -> Result<Self, LayerError> {
        let said = path.display().to_string();
        let failed = |source| LayerError::Read { path: said.clone(), source };
        let data = open_regular(path).map_err(failed)?;
        let about = data.metadata().map_err(failed)?;
        let time = about.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let time = time.map_or_else(Time::default, |since| {
            Time::from_nanos(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
        });
        let len = about.len();
        let item = Item { path: name.to_vec(), what: EntryKind::File(0, len), mode: 0o444, time };
        let counter = Counter::new(&said, &LayerLimits::default(), &names_budget());
        Ok(Self::new(said, vec![item], vec![StoredFile::Plain(0, len)], data, None, counter))
    }

    /// Length of a file.
    pub(crate) fn len(&self, file: u32) -> Option<u64> {
        self.files.get(file as usize).map(StoredFile::len)
    }

    /// The next position of a file from `at` on that is not in a hole of a host file.
    pub(crate) fn next_data(&self, file: u32, at: u64) -> Option<u64> {
        match self.host() {
            Some((host, nodes)) => host.next_data(*nodes.get(file as usize)?, at),
            None => Some(at),
        }
    }

    /// Reads; fails if the archive is shorter than it was when it was opened.
    pub(crate) fn read(
        &self,
        file: u32,
        version: Option<SourceVersion>,
        at: u64,
        out: &mut [u8],
    ) -> Result<(), Refused> {
        let failed = |why: String| Refused::Layer(format!("{}: {why}", self.name));
        match (self.files.get(file as usize).ok_or(Refused::Missing)?, &self.data) {
            (StoredFile::Plain(from, _), Data::File(data)) => {
                data.read_exact_at(out, from + at).map_err(|e| failed(e.to_string()))
            }
            (StoredFile::Packed(file), _) => {
                let packed = self.packed.as_ref().ok_or(Refused::Missing)?;
                packed.read(file, at, out).map_err(failed)
            }
            (StoredFile::Kept(from, _), Data::Kept(bytes)) => {
                bytes.read_at(from + at, out).map_err(failed)
            }
            (StoredFile::Kept(..), Data::Host(host, nodes)) => {
                let node = *nodes.get(file as usize).ok_or(Refused::Missing)?;
                host.read(node, version, at, out).map_err(|error| match error {
                    Refused::Missing => {
                        let path = host.path(node).unwrap_or_default();
                        failed(format!("{} was removed after it had been seen", path.display()))
                    }
                    error => error,
                })
            }
            _ => Err(Refused::Missing),
        }
    }

    /// The identity of this archive: the name that its owner gave, or the digest of its bytes.
    pub(crate) fn identity(&self) -> Result<&str, std::io::Error> {
        if let Some(identity) = self.identity.get() {
            return Ok(identity);
        }
        let identity = match (&self.known_as, &self.data) {
            (Some(known), _) => format!("known:{known}"),
            (None, Data::File(data)) => {
                let digest = digest(data)?;
                let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
                format!("sha256:{hex}")
            }
            // These have an identity from the beginning.
            (None, Data::Kept(_) | Data::Host(..)) => {
                return Err(std::io::ErrorKind::NotFound.into());
            }
        };
        Ok(self.identity.get_or_init(|| identity))
    }
}

/// The SHA-256 of a file.
fn digest(data: &File) -> std::io::Result<[u8; 32]> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    let mut at = 0;
    loop {
        match data.read_at(&mut buffer, at) {
            Ok(0) => break,
            Ok(len) => {
                hash.update(&buffer[..len]);
                at += len as u64;
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(hash.finalize().into())
}

/// Maximum memory for the names in an archive, or in all layers of an image: half a million files
/// with long names.
const MAX_NAMES: usize = 512 << 20;

/// The budget for the names in an archive, or in all layers of an image.
pub(crate) fn names_budget() -> Budget {
    Budget::new("names of an archive", MAX_NAMES)
}

/// Counts what an archive claims.
pub(crate) struct Counter {
    name: String,
    limits: LayerLimits,
    bytes: u64,
    files: u64,
    charge: Charge,
}

impl Counter {
    pub(crate) fn new(name: &str, limits: &LayerLimits, names: &Budget) -> Self {
        let (name, charge) = (name.to_owned(), names.empty());
        Self { name, limits: *limits, bytes: 0, files: 0, charge }
    }

    /// Counts a file of `bytes` bytes, whose path and target have `names` bytes.
    pub(crate) fn add(&mut self, bytes: u64, names: usize) -> Result<(), LayerError> {
        self.files += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        let over = |what, most| LayerError::Limit { path: self.name.clone(), what, most };
        // A list that grows has room for twice its items, and for their copies.
        let items = 3 * (size_of::<Item>() + size_of::<StoredFile>());
        let charged = self.charge.add(names.saturating_add(items));
        charged.map_err(|error| over("bytes of names", error.limit as u64))?;
        if self.files > self.limits.files {
            return Err(over("files", self.limits.files));
        }
        if self.bytes > self.limits.bytes {
            return Err(over("bytes", self.limits.bytes));
        }
        Ok(())
    }
}
