//! The entry of a sandbox in the fleet's ledger: its owner, its last saved state, and its record.
//!
//! Promises: an entry is only ever changed by compare-and-set on its revision. That number is the
//! fence: a host that lost a sandbox names an old revision, so a late save never enters the ledger.
//! Saved states have no names; the digest in the entry finds them.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::format_version::FormatVersion;
pub(crate) use crate::sandbox::records::store::{OwnedEntry, State};
use crate::sandbox::records::store::{SandboxRecord, UnknownFields};

/// A sandbox in the ledger.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    #[serde(default)]
    pub(crate) version: FormatVersion,
    /// The life of its host.
    pub(crate) owner: Option<String>,
    pub(crate) record: SandboxRecord,
    /// Its last save.
    pub(crate) state: Option<State>,
    /// When the record was written, by the clock of the NATS servers, if another host changed the
    /// entry since: the time of the entry is then later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) written: Option<u64>,
    #[serde(flatten)]
    pub(crate) unknown: UnknownFields,
}

impl Entry {
    /// An entry of this version.
    pub(crate) fn new(owner: Option<String>, record: SandboxRecord, state: Option<State>) -> Self {
        let (version, unknown) = (FormatVersion::default(), UnknownFields::default());
        Self { version, owner, record, state, written: None, unknown }
    }

    /// The entry once `life` has taken the sandbox. A host that took it back itself undoes nothing.
    /// `time` is that of the entry before.
    pub(crate) fn taken_by(self, life: &str, again: bool, time: u64) -> Self {
        let lost = self.owner.is_some() && !again;
        let entry = if lost { self.undone() } else { self };
        Self { owner: Some(life.to_owned()), ..entry.passed_on(time) }
    }

    /// The entry as another host than the record's writes it. `time` is that of the entry before.
    pub(crate) fn passed_on(self, time: u64) -> Self {
        Self { written: self.written.or(Some(time)), ..self }
    }

    /// The remaining time of the sandbox at `now`, in milliseconds, by the clock of the NATS
    /// servers. `time` is that of the entry. The clock of the host that wrote the record counts
    /// only against itself.
    pub(crate) fn remaining(&self, time: u64, now: u64) -> u64 {
        let SandboxRecord { ends, noted, .. } = self.record;
        if noted == 0 {
            // An earlier version wrote it: only the end is known.
            return ends.saturating_sub(now);
        }
        let passed = now.saturating_sub(self.written.unwrap_or(time));
        ends.saturating_sub(noted).saturating_sub(passed)
    }

    /// The lifetime of the entry in NATS, which removes it at the end of a running sandbox without
    /// an owner: no host does. `None` for one that a host ends, and for one that is paused or is to
    /// be paused at its end. Times as for [`Entry::remaining`].
    pub(crate) fn unowned_lifetime(&self, time: u64, now: u64) -> Option<u64> {
        let SandboxRecord { paused, pause_at_end, .. } = self.record;
        let ends_alone = self.owner.is_none() && !paused && !pause_at_end;
        ends_alone.then(|| self.remaining(time, now))
    }

    /// The entry once its host was lost: calls since the last save are undone.
    pub(crate) fn undone(mut self) -> Self {
        self.record.generation += 1;
        self
    }
}

/// Hex digits of an id that identify its tenant.
const TENANT_DIGITS: usize = 6;
/// Hex digits of an id.
const ID_DIGITS: usize = 22;

/// The first digits of the ids of a tenant, which select its entries.
pub(crate) fn tenant_prefix(tenant: &str) -> String {
    let digest = Sha256::digest(tenant.as_bytes());
    digest.iter().take(TENANT_DIGITS / 2).map(|byte| format!("{byte:02x}")).collect()
}

/// The key of a sandbox or snapshot; `None` for anything but an id of a fleet.
pub(crate) fn key(id: &str) -> Option<String> {
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (id.len() == ID_DIGITS && id.bytes().all(hex)).then(|| format!("{}.{id}", &id[..TENANT_DIGITS]))
}

/// The key under which a tenant's snapshot of a name is found.
pub(crate) fn named(tenant: &str, name: &str) -> String {
    let digest = Sha256::digest(format!("{tenant}/{name}").as_bytes());
    let digits: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("name.{}.{digits}", tenant_prefix(tenant))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::format_version::tests::{check_goldens, check_unknown_fields};

    #[test]
    fn entries_of_sandboxes_are_read_and_written_as_they_were() {
        let state = State {
            digest: "digest".to_owned(),
            bytes: 1,
            by: "a-1".to_owned(),
            unknown: UnknownFields::default(),
        };
        let entry = Entry {
            version: FormatVersion::default(),
            owner: Some("a-1".to_owned()),
            record: record(),
            state: Some(state),
            written: Some(2),
            unknown: serde_json::from_value(serde_json::json!({"later": 1})).unwrap(),
        };
        check_goldens("entry", &entry);
        check_unknown_fields::<Entry>("entry", 3);
    }

    #[test]
    fn a_sandbox_keeps_what_is_left_of_its_time_on_a_host_with_another_clock() {
        const HOUR: u64 = 3_600_000;
        // The host's clock is a day ahead of the servers', or behind.
        for host in [30 * HOUR, 3 * HOUR] {
            let record = SandboxRecord { ends: host + 2 * HOUR, noted: host, ..record() };
            let entry = Entry::new(Some("a-1".into()), record, None);
            assert_eq!(entry.remaining(6 * HOUR, 6 * HOUR), 2 * HOUR);
            assert_eq!(entry.remaining(6 * HOUR, 7 * HOUR), HOUR);
            assert_eq!(entry.remaining(6 * HOUR, 9 * HOUR), 0);
            // Other hosts change the entry later, and that adds nothing.
            let swept = Entry { owner: None, ..entry.passed_on(6 * HOUR).undone() };
            let taken = swept.taken_by("b-1", false, 6 * HOUR + 1);
            assert_eq!(taken.remaining(7 * HOUR, 7 * HOUR), HOUR);
        }
    }

    /// A record of nothing.
    pub(in crate::fleet) fn record() -> SandboxRecord {
        SandboxRecord {
            id: String::new(),
            tenant: String::new(),
            template: String::new(),
            token: String::new(),
            settings: Default::default(),
            started: 0,
            ends: 0,
            noted: 0,
            paused: false,
            pause_at_end: false,
            runs: 0,
            goes_on: false,
            generation: 0,
            stored: 0,
            memory: 0,
            base: None,
            restarts: false,
            second_name: false,
            key: None,
        }
    }

    /// Entries as version 0.1.0 writes them. They are never changed: each later version reads them.
    #[test]
    fn entries_of_the_first_version_are_still_read() {
        const LIVE: &str = r#"{"owner":"0a1b2c3d4e5f-1","record":{"id":"aabbcc0123456789abcdef","tenant":"acme","template":"script","token":"t","metadata":{"a":"b"},"envs":{"K":"v"},"public":true,"auto_resume":true,"started":1,"ends":9,"noted":2,"paused":false,"pause_at_end":true,"runs":3,"goes_on":true,"generation":4,"stored":5,"memory":6},"state":{"digest":"sha256:00","bytes":7,"by":"0a1b2c3d4e5f-1"},"written":8}"#;
        let live: Entry = serde_json::from_str(LIVE).unwrap();
        assert_eq!((live.owner.as_deref(), live.written), (Some("0a1b2c3d4e5f-1"), Some(8)));
        let SandboxRecord { settings, generation, pause_at_end, .. } = &live.record;
        assert!(settings.public && settings.auto_resume && *pause_at_end && *generation == 4);
        let mut again = serde_json::to_value(&live).unwrap();
        for versioned in ["", "/record"] {
            let fields = again.pointer_mut(versioned).and_then(|found| found.as_object_mut());
            fields.unwrap().remove("version").expect("it has a version");
        }
        let stored: serde_json::Value = serde_json::from_str(LIVE).unwrap();
        assert_eq!(again, stored, "entries have another form");
        // The least that an entry has, of a sandbox that was never saved.
        const MINIMAL: &str = r#"{"owner":null,"record":{"id":"i","tenant":"acme","template":"script","token":"t","metadata":{},"started":1,"ends":9,"paused":true,"pause_at_end":false,"runs":0},"state":null}"#;
        let least: Entry = serde_json::from_str(MINIMAL).unwrap();
        assert!(least.record.paused && least.state.is_none() && least.record.noted == 0);
        // A later version may write more, and this one reads the rest: both run in one fleet during
        // an upgrade.
        let newer = LIVE.replacen("\"written\"", "\"later\":[1],\"written\"", 1);
        assert_eq!(serde_json::from_str::<Entry>(&newer).unwrap().written, Some(8));
    }

    #[test]
    fn keys_are_made_of_ids_and_of_nothing_else() {
        let id = format!("{}{}", tenant_prefix("acme"), "0123456789abcdef");
        assert_eq!(key(&id), Some(format!("{}.{id}", tenant_prefix("acme"))));
        for wrong in [
            "",
            "*",
            ">",
            "0123456789abcdef01234.",
            "0123456789ABCDEF012345",
            "ä123456789abcdef01234",
        ] {
            assert_eq!(key(wrong), None, "{wrong}");
        }
        assert_ne!(named("a", "b"), named("a", "c"));
        assert!(!named("a", "*.>").contains('*'));
    }
}
