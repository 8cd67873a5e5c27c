//! Backup and restoring of a fleet: its ledger and the saved states that the ledger names,
//! together.
//!
//! Promises: hosts keep working during a backup. Each entry and the state that it names are of one
//! moment, because the ledger is read first and states are never changed. A backup is complete or
//! not there: its ledger is written last, in place of the one before. States that the directory has
//! already are not copied again. Nothing is restored below running hosts, and no entry is
//! overwritten. A restore that was interrupted continues. May break it: a collection of the store
//! with a shorter grace than the backup takes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use afresh::store::Store;
use afresh::store::remote::Remote;
use afresh::{Encoding, describe_error};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::backup_error::BackupError;
use super::cipher;
use super::complete_ledger;
use super::config::FleetConfig;
use super::credentials::Role;
use super::nats::{self, Bucket, BucketEntry, NatsConnection, NatsError};
use super::record::Entry;
use super::{catalog, creation_keys, keeper, lease_renewal};

/// The file of the ledger.
const LEDGER: &str = "ledger.jsonl";
/// The directory of the states.
const STATES: &str = "states";
/// The directory that states pass through.
const SCRATCH: &str = "scratch";
/// States that pass before the directory is emptied.
const MAX_FETCHED: usize = 256;
/// The version of that file.
const VERSION: u32 = 1;
/// The format that the first line names.
const FORMAT: &str = "afresh fleet backup";
/// Maximum bytes of a line of the file: an entry in base 64.
const MAX_LINE: u64 = 256 << 10;
/// A running sandbox has at least this long after a restore, in milliseconds.
const MIN_REMAINING: u64 = 60_000;

/// A finished backup or restore.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct BackupReport {
    /// Sandboxes with a saved state.
    pub sandboxes: usize,
    /// Snapshots and names of snapshots.
    pub snapshots: usize,
    /// Templates.
    pub templates: usize,
    /// Saved states.
    pub states: usize,
    /// Running sandboxes that were never saved, by their ids. They are not part of a backup.
    pub unsaved: Vec<String>,
    /// Entries whose states could not be copied, with the reason. They are left out.
    pub missing: Vec<String>,
}

/// The first line of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Head {
    format: String,
    version: u32,
    fleet: String,
    /// Milliseconds since 1970.
    made: u64,
    /// The fingerprint of the key that entries are sealed by; empty without one.
    key: String,
}

/// Another line of the file: an entry.
#[derive(Debug, Serialize, Deserialize)]
struct Line {
    bucket: Kind,
    key: String,
    /// The state that the entry names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    state: Option<String>,
    /// The entry in base 64, sealed if the fleet has a key.
    value: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Sandboxes,
    Kept,
}

impl Kind {
    /// The place that a sealed line is bound to.
    fn place(self, key: &str) -> String {
        let name = match self {
            Self::Sandboxes => "sandboxes",
            Self::Kept => "kept",
        };
        format!("backup/{name}/{key}")
    }

    fn count(self, key: &str, report: &mut BackupReport) {
        match self {
            Self::Sandboxes => report.sandboxes += 1,
            Self::Kept if key.starts_with("template.") => report.templates += 1,
            Self::Kept => report.snapshots += 1,
        }
    }
}

fn file_error(file: &Path) -> impl Fn(std::io::Error) -> BackupError {
    move |source| BackupError::File { file: file.to_owned(), source }
}

fn ledger(error: impl Into<afresh::Cause>) -> BackupError {
    BackupError::Ledger(error.into())
}

/// An entry as a restore writes it: without an owner, and with the rest of its time.
fn at_rest(entry: Entry, time: u64, now: u64) -> Entry {
    let rest = entry.remaining(time, now).max(MIN_REMAINING);
    let lost = entry.owner.is_some();
    let mut entry = if lost { entry.undone() } else { entry };
    (entry.record.noted, entry.record.ends) = (now, now.saturating_add(rest));
    Entry { owner: None, written: None, ..entry }
}

/// An entry in the form that a restore writes.
pub(super) struct RestorableEntry {
    bucket: Kind,
    key: String,
    state: Option<String>,
    value: Bytes,
}

impl BackupReport {
    /// Notes an entry of the ledger that cannot be read.
    fn leave_out(&mut self, key: &str) {
        let missing = format!("the entry {key}, which is sealed by another key or damaged");
        if !self.missing.contains(&missing) {
            self.missing.push(missing);
        }
    }
}

/// An entry as it was before it was sealed. One that cannot be read is left out.
fn readable(bucket: &Bucket, found: BucketEntry, report: &mut BackupReport) -> Option<BucketEntry> {
    let key = found.key.clone();
    let opened = super::readable_entries::open(bucket, found);
    if opened.is_none() {
        report.leave_out(&key);
    }
    opened
}

/// The entries of the ledger.
pub(super) async fn read_ledger(
    links: &NatsConnection,
    report: &mut BackupReport,
) -> Result<Vec<RestorableEntry>, BackupError> {
    // Twice: an entry that changes during the read moves to the end of the list.
    let mut lines = BTreeMap::new();
    for _ in 0..2 {
        for found in nats::every_stored(&links.client, &links.kept).await.map_err(ledger)? {
            // No client waits so long for the answer to its request, and a restored claim would
            // have no lifetime.
            if creation_keys::is_claim(&found.key) {
                continue;
            }
            let Some(found) = readable(&links.kept, found, report) else { continue };
            let state = catalog::digest(&found.key, &found.value);
            let value = catalog::at_rest(&found.key, found.value);
            lines.insert(found.key, (state, value));
        }
    }
    let mut all: Vec<_> = lines
        .into_iter()
        .map(|(key, (state, value))| RestorableEntry { bucket: Kind::Kept, key, state, value })
        .collect();
    let sandboxes = nats::every_stored(&links.client, &links.sandboxes).await.map_err(ledger)?;
    let leases = nats::every(&links.client, &links.hosts).await.map_err(ledger)?;
    // The clock of the NATS servers, as of the last change: hosts renew their leases all the time.
    let times = sandboxes.iter().chain(&leases).map(|found| found.time);
    let now = times.max().unwrap_or_default();
    for found in sandboxes {
        let Some(found) = readable(&links.sandboxes, found, report) else { continue };
        let BucketEntry { key, value, time, .. } = found;
        let Ok(entry) = serde_json::from_slice::<Entry>(&value) else {
            report.leave_out(&key);
            continue;
        };
        let Some(state) = entry.state.as_ref().map(|state| state.digest.clone()) else {
            report.unsaved.push(entry.record.id);
            continue;
        };
        let value = serde_json::to_vec(&at_rest(entry, time, now)).map_err(ledger)?;
        all.push(RestorableEntry {
            bucket: Kind::Sandboxes,
            key,
            state: Some(state),
            value: value.into(),
        });
    }
    Ok(all)
}

/// Copies of states: each is fetched to a directory, which checks its digests, and sent on from
/// there.
struct Copier<'a> {
    from: &'a Remote,
    to: &'a Remote,
    scratch: PathBuf,
    /// The directory, and the states that were fetched to it.
    store: Option<(Store, usize)>,
}

impl Drop for Copier<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.scratch);
    }
}

impl Copier<'_> {
    /// The directory, which is emptied now and then.
    fn store(&mut self) -> Result<&Store, String> {
        if self.store.as_ref().is_none_or(|(_, fetched)| *fetched >= MAX_FETCHED) {
            self.store = None;
            match fs::remove_dir_all(&self.scratch) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.to_string()),
                _ => {}
            }
            let store = Store::create(&self.scratch).map_err(|error| describe_error(&error))?;
            self.store = Some((store, 0));
        }
        let (store, fetched) = self.store.as_mut().ok_or("there is no directory")?;
        *fetched += 1;
        Ok(store)
    }

    /// Copies a state, unless it is there. Its manifest is written last, so one that opens is
    /// whole.
    fn copy(&mut self, digest: &str) -> Result<(), String> {
        if self.to.load(digest).is_ok() {
            return Ok(());
        }
        let (from, to) = (self.from, self.to);
        let store = self.store()?;
        // Under one name, so that the list of names stays short.
        let fetched = from.pull(store, digest, "fetched", Encoding::Raw, &mut |_| {});
        let fetched = fetched.map_err(|error| describe_error(&error))?;
        let snapshot = store.load_id(fetched).map_err(|error| describe_error(&error))?;
        let copied = to.keep(store, &snapshot, Encoding::Raw, &mut |_| {});
        let copied = copied.map_err(|error| describe_error(&error))?;
        match copied.to_string() == digest {
            true => Ok(()),
            false => Err(format!("its copy has the digest {copied}")),
        }
    }
}

/// The outcome of copying states.
struct CopyOutcome {
    /// The states.
    states: usize,
    /// The reasons for those that were not copied, by their digests.
    failed: BTreeMap<String, String>,
}

/// Copies states.
async fn copy_all(
    from: String,
    to: String,
    keeper: String,
    scratch: PathBuf,
    digests: BTreeSet<String>,
) -> Result<CopyOutcome, BackupError> {
    let copying = move || {
        let (from, to) = (open_store(&from)?, open_store(&to)?);
        // Its collection needs the ledger.
        to.claim(&keeper).map_err(|error| BackupError::Store(error.into()))?;
        let mut copier = Copier { from: &from, to: &to, scratch, store: None };
        let mut copied = CopyOutcome { states: 0, failed: BTreeMap::new() };
        for digest in digests {
            match copier.copy(&digest) {
                Ok(()) => copied.states += 1,
                Err(why) => drop(copied.failed.insert(digest, why)),
            }
        }
        Ok(copied)
    };
    // It blocks on threads.
    let done = tokio::task::spawn_blocking(copying).await;
    done.map_err(|error| BackupError::Thread(error.into()))?
}

fn open_store(place: &str) -> Result<Remote, BackupError> {
    super::store(place).map_err(BackupError::Store)
}

fn states_in(dir: &Path) -> String {
    dir.join(STATES).to_string_lossy().into_owned()
}

/// Writes the ledger of the fleet and all states that it names to a directory. States of an earlier
/// backup there are not copied again.
///
/// # Errors
/// [`BackupError`]. The report lists states that cannot be copied.
pub async fn backup(config: &FleetConfig, dir: &Path) -> Result<BackupReport, BackupError> {
    let place = config.store.clone().ok_or(BackupError::NoStore)?;
    let links =
        NatsConnection::open(config, "afresh", Role::Reader).await.map_err(BackupError::Away)?;
    fs::create_dir_all(dir).map_err(file_error(dir))?;
    let mut report = BackupReport::default();
    let entries = read_ledger(&links, &mut report).await?;
    if entries.is_empty() && !report.missing.is_empty() {
        return Err(BackupError::Unreadable(report.missing.len()));
    }
    let is_whole = report.missing.is_empty();
    let digests = entries.iter().filter_map(|entry| entry.state.clone()).collect();
    let scratch = dir.join(SCRATCH);
    let copied = copy_all(place, states_in(dir), keeper(config), scratch, digests).await?;
    report.states = copied.states;
    let head = Head {
        format: FORMAT.to_owned(),
        version: VERSION,
        fleet: config.fleet.clone(),
        made: crate::sandbox::records::store::milliseconds(std::time::SystemTime::now()),
        key: links.fingerprint.clone(),
    };
    let mut lines = vec![serde_json::to_string(&head).map_err(ledger)?];
    for entry in entries {
        if let Some(why) = entry.state.as_ref().and_then(|state| copied.failed.get(state)) {
            report.missing.push(format!("{}: {why}", entry.key));
            continue;
        }
        entry.bucket.count(&entry.key, &mut report);
        let place = entry.bucket.place(&entry.key);
        let sealed = links.kept.seal_at(&place, entry.value).map_err(ledger)?;
        let line = Line {
            bucket: entry.bucket,
            key: entry.key,
            state: entry.state,
            value: STANDARD.encode(sealed),
        };
        lines.push(serde_json::to_string(&line).map_err(ledger)?);
    }
    let file = dir.join(LEDGER);
    complete_ledger::keep_complete(&file, is_whole).map_err(file_error(&file))?;
    write(&file, &lines)?;
    Ok(report)
}

/// Writes the file that completes a backup.
fn write(file: &Path, lines: &[String]) -> Result<(), BackupError> {
    let part = file.with_extension("part");
    let written = || {
        match fs::remove_file(&part) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // Tokens and variables of sandboxes are in it, in clear if the fleet has no key.
        let mut out = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part)?;
        for line in lines {
            out.write_all(line.as_bytes())?;
            out.write_all(b"\n")?;
        }
        out.sync_all()?;
        fs::rename(&part, file)?;
        File::open(file.parent().unwrap_or(Path::new(".")))?.sync_all()
    };
    written().map_err(file_error(file))
}

/// Reads that file.
fn read(file: &Path) -> Result<(Head, Vec<Line>), BackupError> {
    let failed = file_error(file);
    let mut reader = BufReader::new(File::open(file).map_err(&failed)?);
    let damaged =
        |line: usize, fault: String| BackupError::Damaged { file: file.to_owned(), line, fault };
    let (mut head, mut lines) = (None, Vec::new());
    for number in 1.. {
        let mut text = String::new();
        let length = reader.by_ref().take(MAX_LINE).read_line(&mut text).map_err(&failed)?;
        if length == 0 {
            break;
        }
        if !text.ends_with('\n') {
            return Err(damaged(number, "it is cut off, or too long".to_owned()));
        }
        let fault = |error: serde_json::Error| damaged(number, error.to_string());
        if number > 1 {
            lines.push(serde_json::from_str(&text).map_err(fault)?);
            continue;
        }
        let read: Head = serde_json::from_str(&text).map_err(fault)?;
        if read.format != FORMAT || read.version > VERSION {
            let fault = format!(
                "it is `{}` of version {}, and version {VERSION} is the newest known here",
                read.format, read.version
            );
            return Err(damaged(number, fault));
        }
        head = Some(read);
    }
    Ok((head.ok_or_else(|| damaged(1, "it is empty".to_owned()))?, lines))
}

/// Writes a backup to the ledger and the store of a fleet without hosts. Running sandboxes have the
/// rest of their time from now on.
///
/// # Errors
/// [`BackupError`]. The report lists states that cannot be copied.
pub async fn restore(config: &FleetConfig, dir: &Path) -> Result<BackupReport, BackupError> {
    let place = config.store.clone().ok_or(BackupError::NoStore)?;
    let file = dir.join(LEDGER);
    let (head, lines) = read(&file)?;
    let links =
        NatsConnection::open(config, "afresh", Role::Admin).await.map_err(BackupError::Away)?;
    if head.key != links.fingerprint {
        let fault = match (head.key.is_empty(), links.fingerprint.is_empty()) {
            (true, _) => "its entries are not sealed; restore it without `entry-key`",
            (_, true) => "its entries are sealed; name the file of their key as `entry-key`",
            _ => "its entries are sealed by another key than that of `entry-key`",
        };
        return Err(BackupError::Key { file, fault });
    }
    let names = lease_renewal::names(&links).await.map_err(ledger)?;
    if !names.is_empty() {
        return Err(BackupError::Running { names: names.join(", ") });
    }
    let digests = lines.iter().filter_map(|line| line.state.clone()).collect();
    let scratch = dir.join(SCRATCH);
    let copied = copy_all(states_in(dir), place, keeper(config), scratch, digests).await?;
    let mut report = BackupReport { states: copied.states, ..BackupReport::default() };
    for (number, line) in lines.into_iter().enumerate() {
        // Backups of earlier builds have claims.
        if creation_keys::is_claim(&line.key) {
            continue;
        }
        if let Some(why) = line.state.as_ref().and_then(|state| copied.failed.get(state)) {
            report.missing.push(format!("{}: {why}", line.key));
            continue;
        }
        let damaged =
            |fault: String| BackupError::Damaged { file: file.clone(), line: number + 2, fault };
        let value = STANDARD.decode(&line.value).map_err(|error| damaged(error.to_string()))?;
        if !head.key.is_empty() && !cipher::is_sealed(&value) {
            return Err(damaged(
                "an entry is not sealed, and the others are: it was replaced".to_owned(),
            ));
        }
        let place = line.bucket.place(&line.key);
        let value = links.kept.open_at(&place, value.into());
        let value = value.map_err(|error| damaged(error.to_string()))?;
        let bucket = match line.bucket {
            Kind::Sandboxes => &links.sandboxes,
            Kind::Kept => &links.kept,
        };
        let revision = match nats::create(bucket, &line.key, value.clone()).await {
            Ok(revision) => revision,
            Err(NatsError::Changed) => {
                // From a restore that was interrupted.
                let there = nats::find(bucket, &line.key).await.map_err(ledger)?;
                match there.filter(|there| there.value == value) {
                    Some(there) => there.revision,
                    None => return Err(BackupError::Exists { key: line.key }),
                }
            }
            Err(error) => return Err(ledger(error)),
        };
        // No host ends a sandbox that no client uses.
        if line.bucket == Kind::Sandboxes
            && let Some(lifetime) = serde_json::from_slice::<Entry>(&value)
                .map_err(|error| damaged(error.to_string()))?
                .unowned_lifetime(0, 0)
        {
            let ending = nats::update_for(bucket, &line.key, value, revision, Some(lifetime));
            ending.await.map_err(ledger)?;
        }
        line.bucket.count(&line.key, &mut report);
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> Head {
        Head {
            format: FORMAT.to_owned(),
            version: VERSION,
            fleet: "default".to_owned(),
            made: 1,
            key: String::new(),
        }
    }

    #[test]
    fn a_backup_of_a_released_version_is_read() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/backup-1.jsonl");
        let (head, lines) = read(&golden).unwrap();
        let kinds = (lines[0].bucket, lines[1].bucket);
        assert_eq!((head.version, kinds), (1, (Kind::Sandboxes, Kind::Kept)));
        let entry = STANDARD.decode(&lines[0].value).unwrap();
        assert_eq!(serde_json::from_slice::<Entry>(&entry).unwrap().owner.unwrap(), "a-1");
    }

    #[test]
    fn a_damaged_backup_names_its_line() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(LEDGER);
        let head = serde_json::to_string(&head()).unwrap();
        let line = r#"{"bucket":"kept","key":"template.1","state":"sha256:1","value":"eA=="}"#;
        write(&file, &[head.clone(), line.to_owned()]).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        let (read_head, lines) = read(&file).unwrap();
        assert_eq!((read_head.version, lines.len(), lines[0].bucket), (1, 1, Kind::Kept));
        let newer = head.replace(r#""version":1"#, r#""version":9"#);
        for (text, number, fault) in [
            (String::new(), 1, "empty"),
            (newer + "\n", 1, "version 9"),
            (format!("{head}\n{line}"), 2, "cut off"),
            (format!("{head}\n{line}\nnonsense\n"), 3, "expected"),
            (format!("{head}\n{}\n", "x".repeat(300 << 10)), 2, "too long"),
        ] {
            fs::write(&file, text).unwrap();
            let error = read(&file).err().unwrap().to_string();
            assert!(error.contains(&format!("line {number} ")) && error.contains(fault), "{error}");
        }
    }
}
