//! Bodies of requests for builds of templates, in the shape of E2B's API.
//!
//! Promises: as `requests`.

use serde::Deserialize;

use super::requests::Presence;

/// A template that is to be built.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct NewTemplate {
    pub(crate) name: Option<String>,
    pub(crate) alias: Option<String>,
    #[serde(default)]
    pub(crate) tags: Option<Vec<String>>,
    pub(crate) cpu_count: Option<u32>,
    #[serde(rename = "memoryMB")]
    pub(crate) memory_mib: Option<u64>,
    #[serde(rename = "minFreeDiskMB")]
    pub(crate) min_free_disk_mib: Option<u64>,
    #[serde(rename = "teamID", default)]
    _team: Presence,
}

/// Tags that a build gets or loses.
#[derive(Deserialize)]
pub(crate) struct TagRequest {
    /// The build, as `NAME:TAG`.
    #[serde(alias = "name")]
    pub(crate) target: String,
    pub(crate) tags: Vec<String>,
}

/// The base and the steps of a build.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct BuildPlan {
    pub(crate) from_image: Option<String>,
    pub(crate) from_template: Option<String>,
    #[serde(default)]
    pub(crate) from_image_registry: Presence,
    /// Whether no state of an earlier build is used.
    #[serde(default)]
    pub(crate) force: bool,
    #[serde(default)]
    pub(crate) steps: Vec<StepRequest>,
    pub(crate) start_cmd: Option<String>,
    pub(crate) ready_cmd: Option<String>,
}

/// A step as a client sends it.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct StepRequest {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    #[serde(default)]
    pub(crate) args: Option<Vec<String>>,
    pub(crate) files_hash: Option<String>,
    #[serde(default)]
    pub(crate) force: Option<bool>,
    #[serde(rename = "forceUpload", default)]
    _force_upload: Presence,
}
