//! `oci-layout` and `index.json`: what an image layout holds, under which names.
//!
//! A layout may be shared with other tools, which put other images and artifacts into it. Those are
//! kept unchanged, to the last field, and never taken for a snapshot.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::format::descriptor::{Descriptor, REF_NAME};
use crate::format::json::check_weight;
use crate::format::manifest::{Document, MAX_INDEX_JSON, print};
use crate::{OpenError, SaveError, Sha256};

pub(crate) const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";
/// The name that means the only snapshot there is, where nothing is called so.
const LATEST: &str = "latest";

/// `index.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct IndexJson {
    pub(crate) schema_version: u32,
    /// Some tools leave it out.
    #[serde(default = "index_type")]
    pub(crate) media_type: String,
    pub(crate) manifests: Vec<Descriptor>,
    /// Fields of other tools.
    #[serde(flatten)]
    pub(crate) others: BTreeMap<String, Value>,
}

fn index_type() -> String {
    INDEX_TYPE.to_owned()
}

impl Default for IndexJson {
    fn default() -> Self {
        Self {
            schema_version: 2,
            media_type: index_type(),
            manifests: Vec::new(),
            others: BTreeMap::new(),
        }
    }
}

impl Document for IndexJson {
    const NAME: &'static str = "`index.json` (untag what is not needed, or begin another store)";
    const MAX: u64 = MAX_INDEX_JSON;
}

impl IndexJson {
    pub(crate) fn check(&self) -> Result<(), OpenError> {
        if self.schema_version != 2 {
            return Err(OpenError::MediaType {
                what: "`index.json`",
                found: format!("schema version {}", self.schema_version),
            });
        }
        Ok(())
    }

    /// Points `name` to `descriptor`, or removes it. An entry of another tool loses the name and
    /// stays.
    pub(crate) fn rename(&mut self, name: &str, descriptor: Option<Descriptor>) {
        for other in &mut self.manifests {
            if other.name() == Some(name) && other.is_snapshot() == Some(false) {
                other.annotations.remove(REF_NAME);
            }
        }
        self.manifests.retain(|other| other.name() != Some(name));
        self.manifests.extend(descriptor);
        self.manifests.sort_by(|a, b| a.annotations.cmp(&b.annotations));
    }

    /// The manifest that `name` means.
    pub(crate) fn target(&self, name: &str) -> Option<Sha256> {
        self.manifests.iter().find(|it| it.name() == Some(name))?.digest.parse().ok()
    }

    /// The names that mean the manifest `id`.
    pub(crate) fn names_of(&self, id: Sha256) -> Vec<String> {
        let mean = self.manifests.iter().filter(|it| it.digest.parse() == Ok(id));
        mean.filter_map(|it| it.name().map(str::to_owned)).collect()
    }

    /// The file, within the limits of readers.
    pub(crate) fn bytes(&self) -> Result<Vec<u8>, SaveError> {
        let bytes = print(self)?;
        check_weight(Self::NAME, &bytes)?;
        Ok(bytes)
    }
}

/// `oci-layout`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LayoutJson {
    pub(crate) image_layout_version: String,
}

/// A name and its snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tag {
    /// The name.
    pub name: String,
    /// The snapshot.
    pub id: Sha256,
}

/// The names of snapshots, in order.
pub(crate) fn tags_of(snapshots: &[Descriptor]) -> Result<Vec<Tag>, OpenError> {
    let mut tags = Vec::new();
    for descriptor in snapshots {
        if let Some(name) = descriptor.name() {
            tags.push(Tag { name: name.to_owned(), id: descriptor.digest("`index.json`")? });
        }
    }
    tags.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(tags)
}

/// What `name` means among `snapshots`; `latest` may be the only one, named or not.
pub(crate) fn resolve_in<'a>(
    snapshots: &'a [Descriptor],
    name: &str,
) -> Result<&'a Descriptor, OpenError> {
    if let Some(named) = snapshots.iter().find(|it| it.name() == Some(name)) {
        return Ok(named);
    }
    if let (LATEST, [first, rest @ ..]) = (name, snapshots)
        && rest.iter().all(|it| it.digest == first.digest)
    {
        return Ok(first);
    }
    let known = snapshots.iter().filter_map(|it| it.name().map(str::to_owned)).collect();
    Err(OpenError::NoSuchName { name: name.to_owned(), known })
}
