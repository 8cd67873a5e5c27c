//! Records of sandboxes and snapshots, without their pages: one small file each.
//!
//! Promises: a file is whole or absent, and on disk before the operation returns.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::format_version::FormatVersion;
use crate::private_directory::{create_private, open_private};
use crate::sandbox::catalog::base_state::BaseState;
use crate::sandbox::records::creation_key::CreationKey;
use crate::sandbox::request_body::network_rules::NetworkRules;
use crate::sandbox::request_body::unknown_fields::UnknownFields;

/// Settings that a client chose for a sandbox. Its forks have the same.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct SandboxSettings {
    /// The version of the whole record.
    #[serde(default)]
    pub(crate) version: FormatVersion,
    /// Labels.
    pub(crate) metadata: BTreeMap<String, String>,
    /// Variables in the environment of code and commands.
    #[serde(default)]
    pub(crate) envs: BTreeMap<String, String>,
    /// Programs in it are reached from outside without its token.
    #[serde(default)]
    pub(crate) public: bool,
    /// The `Host` of requests to its programs, where `${PORT}` stands for the port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) host: Option<String>,
    /// A pause at its end keeps its files alone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) files_only: bool,
    /// A request into it resumes it after a pause.
    #[serde(default)]
    pub(crate) auto_resume: bool,
    /// Where commands start, if its template says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) directory: Option<String>,
    /// Commands without a user run as `root`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) root: bool,
    /// Rules for its connections.
    #[serde(default, skip_serializing_if = "NetworkRules::is_default")]
    pub(crate) network: NetworkRules,
    /// Fields of the whole record that a later version has added. Forks inherit them.
    #[serde(flatten)]
    pub(crate) unknown: UnknownFields,
}

/// A template that was built over the API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BuiltTemplate {
    /// The number of the build.
    pub(crate) id: String,
    /// The template's name, without a tag.
    pub(crate) template: String,
    /// Milliseconds since 1970.
    pub(crate) made: u64,
    #[serde(flatten)]
    pub(crate) unknown: UnknownFields,
}

/// A sandbox that was saved.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SandboxRecord {
    pub(crate) id: String,
    pub(crate) tenant: String,
    pub(crate) template: String,
    pub(crate) token: String,
    #[serde(flatten)]
    pub(crate) settings: SandboxSettings,
    /// Milliseconds since 1970.
    pub(crate) started: u64,
    pub(crate) ends: u64,
    /// When the record was made, by the same clock as `ends`.
    #[serde(default)]
    pub(crate) noted: u64,
    pub(crate) paused: bool,
    pub(crate) pause_at_end: bool,
    pub(crate) runs: u64,
    /// It has background work.
    #[serde(default)]
    pub(crate) goes_on: bool,
    /// The number of hosts that were lost with it, so that calls since its last save were undone.
    #[serde(default)]
    pub(crate) generation: u64,
    /// Bytes that its saved state stores.
    #[serde(default)]
    pub(crate) stored: u64,
    /// Bytes of memory that it had when it was live.
    #[serde(default)]
    pub(crate) memory: u64,
    /// The state that it began in, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) base: Option<BaseState>,
    /// The next resume drops the memory of its saved state: it starts `base` with its files.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) restarts: bool,
    /// Its saved state has the second of its two names.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) second_name: bool,
    /// The key of the request that made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) key: Option<CreationKey>,
}

impl SandboxRecord {
    /// Has the next resume drop the memory of the saved state.
    pub(crate) fn drop_memory(&mut self) {
        // The memory after the restart is not known yet.
        (self.restarts, self.memory) = (true, 0);
    }
}

/// A snapshot that sandboxes can be made from.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SnapshotRecord {
    #[serde(default)]
    pub(crate) version: FormatVersion,
    pub(crate) id: String,
    pub(crate) tenant: String,
    pub(crate) template: String,
    pub(crate) sandbox: String,
    pub(crate) names: Vec<String>,
    /// Variables of the sandbox, which those made from it have too.
    #[serde(default)]
    pub(crate) envs: BTreeMap<String, String>,
    /// Where commands of sandboxes made from it start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) directory: Option<String>,
    /// Commands without a user of sandboxes made from it run as `root`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) root: bool,
    /// Set for a template.
    #[serde(default)]
    pub(crate) built: Option<BuiltTemplate>,
    /// Bytes that it stores.
    #[serde(default)]
    pub(crate) stored: u64,
    /// The state that its sandbox began in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) base: Option<BaseState>,
    #[serde(flatten)]
    pub(crate) unknown: UnknownFields,
}

/// Milliseconds since 1970.
pub(crate) fn milliseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The names of templates that the server makes of images for builds begin like this.
pub(crate) const IMAGE: &str = "image-";
/// The end of the second name of a saved sandbox. No id has a dot.
const SECOND: &str = ".2";
/// The names of states after steps of a build begin like this.
pub(crate) const LAYER: &str = "layer:";

impl SnapshotRecord {
    /// Whether it is the state after a step of a build, which only later builds use.
    pub(crate) fn is_layer(&self) -> bool {
        self.names.iter().any(|name| name.starts_with(LAYER))
    }
}

/// The extension of a list of records that are exchanged together. It has the id of the first.
const EXCHANGE: &str = "exchange";

/// A directory of such files.
#[derive(Clone, Debug)]
pub(crate) struct Records {
    dir: PathBuf,
}

impl Records {
    /// The directory, made if it is missing. Records have tokens, so it is the server's alone.
    pub(crate) fn open(dir: PathBuf) -> io::Result<Self> {
        open_private(&dir)?;
        let this = Self { dir };
        this.complete_exchanges()?;
        Ok(this)
    }

    fn path(&self, id: &str) -> PathBuf {
        self.dir.join(id).with_extension("json")
    }

    /// Whether one exists, readable or not.
    pub(crate) fn has(&self, id: &str) -> bool {
        self.path(id).exists()
    }

    /// Keeps a record, in place of the one before.
    pub(crate) fn store_record(&self, id: &str, record: &impl Serialize) -> io::Result<()> {
        self.store_all(&[(id, record)])
    }

    /// Keeps several records, in place of those before: all of them, or none where one cannot be
    /// written. A process that ends meanwhile leaves all or none to the next one.
    pub(crate) fn store_all<R: Serialize>(&self, records: &[(&str, &R)]) -> io::Result<()> {
        let part = |id: &str| self.path(id).with_extension("part");
        let write = |path: &Path, text: &[u8]| {
            let mut file = create_private(path)?;
            file.write_all(text)?;
            file.sync_all()
        };
        // A single record is exchanged at once. More are named in a list, whose name is the moment
        // of the exchange.
        let list = records.first().filter(|_| records.len() > 1).map(|(id, _)| {
            let list = self.path(id).with_extension(EXCHANGE);
            (list.with_extension("exchange-part"), list)
        });
        let written = records
            .iter()
            .try_for_each(|(id, record)| write(&part(id), &serde_json::to_vec(record)?));
        let written = written.and_then(|()| {
            let Some((list_part, list)) = &list else { return Ok(()) };
            let ids: Vec<&str> = records.iter().map(|(id, _)| *id).collect();
            write(list_part, &serde_json::to_vec(&ids)?)?;
            // The names of the parts are on the disk before that of the list.
            sync(&self.dir)?;
            fs::rename(list_part, list)?;
            sync(&self.dir)
        });
        if let Err(error) = written {
            // On a full disk even that may fail; the next record of this id takes its place.
            let lists = list.iter().flat_map(|(part, list)| [part, list]);
            lists.for_each(|path| drop(fs::remove_file(path)));
            records.iter().for_each(|(id, _)| drop(fs::remove_file(part(id))));
            return Err(error);
        }
        let exchanged = self.exchange(records.iter().map(|(id, _)| *id));
        match exchanged.and_then(|()| list.map_or(Ok(()), |(_, list)| fs::remove_file(list))) {
            // The list has its name, so that the records count as exchanged.
            Err(error) if records.len() > 1 => {
                tracing::error!(%error, "records are exchanged at the next start of the server");
                Ok(())
            }
            exchanged => exchanged,
        }
    }

    /// Puts written records in place of those before.
    fn exchange<'a>(&self, ids: impl Iterator<Item = &'a str>) -> io::Result<()> {
        for id in ids {
            match fs::rename(self.path(id).with_extension("part"), self.path(id)) {
                // A process did that before it ended.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                renamed => renamed?,
            }
        }
        sync(&self.dir)
    }

    /// Completes exchanges of several records that a process has begun and not ended.
    fn complete_exchanges(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.dir)? {
            let list = entry?.path();
            if list.extension().is_some_and(|extension| extension == EXCHANGE) {
                let ids: Vec<String> = serde_json::from_slice(&fs::read(&list)?)?;
                self.exchange(ids.iter().map(String::as_str))?;
                fs::remove_file(list)?;
            }
        }
        Ok(())
    }

    /// A record, if it exists. One that cannot be read is named in the log and left under another
    /// name.
    pub(crate) fn get<T: DeserializeOwned>(&self, id: &str) -> io::Result<Option<T>> {
        let path = self.path(id);
        let text = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text?,
        };
        match serde_json::from_slice(&text) {
            Ok(record) => Ok(Some(record)),
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "not a record; it is set aside as .damaged");
                fs::rename(&path, path.with_extension("damaged"))?;
                Ok(None)
            }
        }
    }

    /// A record, if it exists. One that cannot be read is an error, and is left where it is.
    pub(crate) fn peek<T: DeserializeOwned>(&self, id: &str) -> io::Result<Option<T>> {
        match fs::read(self.path(id)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            text => Ok(Some(serde_json::from_slice(&text?)?)),
        }
    }

    /// Removes a record, if it exists.
    pub(crate) fn remove(&self, id: &str) -> io::Result<()> {
        match fs::remove_file(self.path(id)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => sync(&self.dir),
        }
    }

    /// Every record. One that cannot be read is named in the log and left where it is.
    pub(crate) fn all<T: DeserializeOwned>(&self) -> io::Result<Vec<T>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let read: io::Result<T> =
                fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?));
            match read {
                Ok(record) => all.push(record),
                Err(error) => tracing::error!(path = %path.display(), %error, "not a record"),
            }
        }
        Ok(all)
    }
}

fn sync(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// The name of a saved sandbox in the store. Each has two, so that a state can take the place of
/// the one before when its record does.
pub(crate) fn saved_name(id: &str, second: bool) -> String {
    format!("sandbox-{id}{}", if second { SECOND } else { "" })
}

/// The id of a saved sandbox, and whether it is under its second name.
pub(crate) fn saved_id(name: &str) -> Option<(&str, bool)> {
    let id = name.strip_prefix("sandbox-")?;
    Some(id.strip_suffix(SECOND).map_or((id, false), |id| (id, true)))
}

/// The reference of an object in the store.
pub(crate) fn state_reference(dir: &std::path::Path, name: &str) -> String {
    format!("{}@{name}", dir.join("snapshots").display())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use serde_json::{Value, json};

    use super::*;
    use crate::format_version::tests::{check_goldens, check_unknown_fields};
    use crate::sandbox::lifecycle::sandbox::Sandbox;

    #[test]
    fn a_server_keeps_the_fields_that_a_later_version_has_added() {
        let text = json!({
            "id": "i", "tenant": "acme", "template": "script", "token": "t", "metadata": {},
            "started": 1, "ends": 9, "paused": true, "pause_at_end": false, "runs": 0,
            "base": "later:1", "restarts": true, "network": {"internet": true, "later": [1]},
            "later": {"a": null},
        });
        let record: SandboxRecord = serde_json::from_value(text.clone()).unwrap();
        let again = serde_json::to_value(Sandbox::recorded(record).record()).unwrap();
        for field in ["base", "restarts", "network", "later"] {
            assert_eq!(again[field], text[field], "{again}");
        }
        // One with more than a server keeps is refused.
        let mut long = text;
        long["later"] = Value::String("x".repeat(1 << 20));
        assert!(serde_json::from_value::<SandboxRecord>(long).is_err());
    }

    fn base() -> Option<BaseState> {
        Some(BaseState::template("digest"))
    }

    #[test]
    fn records_of_sandboxes_are_read_and_written_as_they_were() {
        let rules = json!({"allowOut": ["a.example"], "denyOut": ["0.0.0.0/0"], "internet": false,
            "rules": {"a.example": [{"transform": {"headers": {"x": "y"}}}]}});
        let settings = SandboxSettings {
            version: FormatVersion::default(),
            metadata: BTreeMap::from([("label".to_owned(), "value".to_owned())]),
            envs: BTreeMap::from([("NAME".to_owned(), "value".to_owned())]),
            public: true,
            host: Some("${PORT}.example".to_owned()),
            files_only: true,
            auto_resume: true,
            directory: Some("/srv".to_owned()),
            root: true,
            network: serde_json::from_value(rules).unwrap(),
            unknown: serde_json::from_value(json!({"later": 1})).unwrap(),
        };
        let record = SandboxRecord {
            id: "id".to_owned(),
            tenant: "acme".to_owned(),
            template: "script".to_owned(),
            token: "token".to_owned(),
            settings,
            started: 1,
            ends: 9,
            noted: 2,
            paused: true,
            pause_at_end: true,
            runs: 3,
            goes_on: true,
            generation: 4,
            stored: 5,
            memory: 6,
            base: base(),
            restarts: true,
            second_name: true,
            key: Some(
                serde_json::from_value(json!({"digest": "d", "request": "r", "rule": 1})).unwrap(),
            ),
        };
        check_goldens("sandbox", &record);
        check_unknown_fields::<SandboxRecord>("sandbox", 3);
    }

    #[test]
    fn records_of_snapshots_are_read_and_written_as_they_were() {
        let built = BuiltTemplate {
            id: "build".to_owned(),
            template: "web".to_owned(),
            made: 1,
            unknown: UnknownFields::default(),
        };
        let record = SnapshotRecord {
            version: FormatVersion::default(),
            id: "id".to_owned(),
            tenant: "acme".to_owned(),
            template: "script".to_owned(),
            sandbox: "source".to_owned(),
            names: vec!["web".to_owned()],
            envs: BTreeMap::from([("NAME".to_owned(), "value".to_owned())]),
            directory: Some("/srv".to_owned()),
            root: true,
            built: Some(built),
            stored: 5,
            base: base(),
            unknown: serde_json::from_value(json!({"later": 1})).unwrap(),
        };
        check_goldens("snapshot", &record);
        check_unknown_fields::<SnapshotRecord>("snapshot", 2);
    }

    #[test]
    fn an_exchange_of_several_records_that_was_cut_short_is_completed() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Records::open(dir.path().join("names")).unwrap();
        let file = |name: &str| dir.path().join("names").join(name);
        let records = open();
        records.store_all(&[("one", &json!(["web"])), ("two", &json!([]))]).unwrap();
        assert!(!file("one.exchange").exists());
        // A process that ended after it had put one of two records in its place.
        records.store_record("one", &json!([])).unwrap();
        fs::write(file("two.part"), r#"["web"]"#).unwrap();
        fs::write(file("one.exchange"), r#"["one", "two"]"#).unwrap();
        let next = open();
        let read = |id: &str| next.peek::<Value>(id).unwrap().unwrap();
        assert_eq!((read("one"), read("two")), (json!([]), json!(["web"])));
        assert!(!file("one.exchange").exists() && !file("two.part").exists());
        // One that ended before the exchange changed nothing.
        fs::write(file("two.part"), "[]").unwrap();
        fs::write(file("one.exchange-part"), r#"["one", "two"]"#).unwrap();
        assert_eq!(open().peek::<Value>("two").unwrap().unwrap(), json!(["web"]));
        records.store_all(&[("one", &json!([1])), ("two", &json!([2]))]).unwrap();
        assert_eq!((read("one"), read("two")), (json!([1]), json!([2])));
    }

    #[test]
    fn stored_records_are_found_and_a_damaged_one_hides_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path().join("snapshots")).unwrap();
        let record = SnapshotRecord {
            version: FormatVersion::default(),
            id: "a".to_owned(),
            tenant: "t".to_owned(),
            template: "x".to_owned(),
            sandbox: "s".to_owned(),
            names: vec!["n".to_owned()],
            envs: BTreeMap::new(),
            directory: None,
            root: false,
            built: None,
            stored: 0,
            base: None,
            unknown: UnknownFields::default(),
        };
        records.store_record("a", &record).unwrap();
        records.store_record("b", &record).unwrap();
        for path in ["snapshots", "snapshots/a.json"] {
            let mode = fs::metadata(dir.path().join(path)).unwrap().permissions().mode();
            assert_eq!(mode & 0o077, 0, "{path} is open to other users");
        }
        fs::write(dir.path().join("snapshots/c.json"), "{").unwrap();
        fs::write(dir.path().join("snapshots/d.part"), "{").unwrap();
        // The disk refuses to read it.
        fs::create_dir(dir.path().join("snapshots/e.json")).unwrap();
        assert_eq!(records.all::<SnapshotRecord>().unwrap().len(), 2);
        records.remove("a").unwrap();
        records.remove("a").unwrap();
        assert_eq!(records.all::<SnapshotRecord>().unwrap().len(), 1);
    }
}
