//! The manifest of a server: several guests under several routes, each with a separate budget.
//!
//! Promises: an unknown key is an error that names it, and so are two guests for the same host and
//! route; nothing is guessed. Paths are relative to the file.

mod check;
mod keys;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[cfg(linux_guests)]
use afresh::linux::NetGrant;
use afresh::wasm::{GuestOptions, Mode};
use afresh::{Call, Options};
use serde::{Deserialize, Deserializer};
use toml::Spanned;

pub use check::ConfigFault;
pub use keys::keys;

use crate::audit::AuditConfig;
use crate::config::{Config, GuestConfig, parse_duration};
use crate::error::ManifestError;
use crate::sandbox::{Keys, Limits, MAX_WEIGHT, SandboxConfig, Template as SandboxTemplate};

/// A length of time, as text.
#[derive(Clone, Copy, Debug)]
struct Time(Duration);

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum DurationText {
            Seconds(u64),
            Text(String),
        }
        match DurationText::deserialize(deserializer)? {
            DurationText::Seconds(seconds) => Ok(Self(Duration::from_secs(seconds))),
            DurationText::Text(text) => {
                parse_duration(&text).map(Self).map_err(serde::de::Error::custom)
            }
        }
    }
}

/// A mode, by its name.
#[derive(Clone, Copy, Debug)]
struct ModeName(Mode);

impl<'de> Deserialize<'de> for ModeName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        name.parse().map(Self).map_err(serde::de::Error::custom)
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    addr: Option<SocketAddr>,
    admin: Option<SocketAddr>,
    max_concurrent_requests: Option<usize>,
    max_concurrent_connections: Option<usize>,
    max_buffered_mib: Option<usize>,
    max_connections_per_address: Option<usize>,
    max_requests_per_address: Option<u32>,
    forwarded_for: Option<bool>,
    audit: Option<PathBuf>,
    audit_required: Option<bool>,
    head_timeout: Option<Time>,
    body_timeout: Option<Time>,
    drain: Option<Time>,
    grace: Option<Time>,
    #[serde(default)]
    guest: Vec<Spanned<Guest>>,
    sandboxes: Option<Sandboxes>,
    #[cfg(feature = "fleet")]
    fleet: Option<Fleet>,
    #[cfg(feature = "tls")]
    tls_cert: Option<Spanned<PathBuf>>,
    #[cfg(feature = "tls")]
    tls_key: Option<Spanned<PathBuf>>,
}

#[cfg(feature = "fleet")]
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Fleet {
    nats: String,
    credentials: Option<PathBuf>,
    ca: Option<PathBuf>,
    certificate: Option<PathBuf>,
    certificate_key: Option<PathBuf>,
    entry_key: Option<PathBuf>,
    require_sealed: Option<bool>,
    store: Option<String>,
    fleet: Option<String>,
    name: Option<String>,
    lease: Option<Time>,
    replicas: Option<usize>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Guest {
    guest: String,
    name: Option<String>,
    route: Option<String>,
    host: Option<String>,
    #[serde(default)]
    warm: Vec<String>,
    call: Option<String>,
    mode: Option<ModeName>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    content_type: Option<String>,
    timeout: Option<Time>,
    memory_mib: Option<u64>,
    max_body_kib: Option<usize>,
    max_concurrent_requests: Option<usize>,
    max_waiting_requests: Option<usize>,
    max_instance_reuse_count: Option<usize>,
    idle_instance_timeout: Option<Time>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Sandboxes {
    keys: Spanned<PathBuf>,
    store: PathBuf,
    require_metrics_key: Option<bool>,
    window: Option<Time>,
    limits: Option<Spanned<LimitsTable>>,
    tenant_limits: Option<LimitsTable>,
    #[serde(default)]
    tenants: BTreeMap<Spanned<String>, LimitsTable>,
    max_sandboxes: Option<usize>,
    max_snapshots: Option<usize>,
    max_running_calls: Option<usize>,
    max_computing_calls: Option<NonZero<usize>>,
    max_memory_mib: Option<u64>,
    build_images: Option<Vec<String>>,
    public_traffic: Option<bool>,
    idle_timeout: Option<Time>,
    timeout: Option<Time>,
    call_timeout: Option<Time>,
    cpu_limit: Option<Time>,
    #[serde(default)]
    template: Vec<Spanned<Template>>,
    #[cfg(feature = "oidc")]
    #[serde(default)]
    oidc: Vec<Spanned<Oidc>>,
}

/// An issuer of bearer tokens.
#[cfg(feature = "oidc")]
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Oidc {
    issuer: String,
    audience: String,
    tenant_claim: Option<String>,
    scope_claim: Option<String>,
    jwks: Option<String>,
    tenants: Option<Vec<String>>,
    scopes: Option<Vec<String>>,
}

#[cfg(feature = "oidc")]
impl From<Oidc> for crate::OidcConfig {
    fn from(table: Oidc) -> Self {
        let mut config = Self::new(table.issuer, table.audience);
        set(&mut config.tenant_claim, table.tenant_claim);
        set(&mut config.scope_claim, table.scope_claim);
        config.jwks = table.jwks;
        (config.tenants, config.scopes) = (table.tenants, table.scopes);
        config
    }
}

/// Limits of one tenant, or of all together.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct LimitsTable {
    max_sandboxes: Option<usize>,
    max_memory_mib: Option<u64>,
    max_stored_mib: Option<u64>,
    max_connections: Option<usize>,
    max_running_calls: Option<usize>,
    cpu_seconds: Option<u64>,
    sent_mib: Option<u64>,
    outbound_mib: Option<u64>,
    weight: Option<Weight>,
}

/// The weight of a tenant.
#[derive(Clone, Copy, Debug)]
struct Weight(u32);

impl<'de> Deserialize<'de> for Weight {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let weight = u32::deserialize(deserializer)?;
        match (1..=MAX_WEIGHT).contains(&weight) {
            true => Ok(Self(weight)),
            false => {
                let message = format!("a weight is from 1 to {MAX_WEIGHT}, and not {weight}");
                Err(serde::de::Error::custom(message))
            }
        }
    }
}

impl LimitsTable {
    /// A key that only tenants have, if it is set.
    fn tenant_key(&self) -> Option<&'static str> {
        let weight = self.weight.map(|_| "weight");
        self.max_running_calls.map(|_| "max-running-calls").or(weight)
    }
}

impl From<LimitsTable> for Limits {
    fn from(table: LimitsTable) -> Self {
        let bytes = |mib: Option<u64>| mib.map(|mib| mib.saturating_mul(1 << 20));
        Self {
            sandboxes: table.max_sandboxes,
            memory: bytes(table.max_memory_mib),
            stored: bytes(table.max_stored_mib),
            connections: table.max_connections,
            running_calls: table.max_running_calls,
            cpu_time: table.cpu_seconds.map(Duration::from_secs),
            sent: bytes(table.sent_mib),
            outbound: bytes(table.outbound_mib),
            weight: table.weight.map(|weight| weight.0),
        }
    }
}

/// A build without Linux programs refuses each template with `net`, because of `linux` or of its
/// absence, and does not read the grants.
#[cfg(not(linux_guests))]
type NetGrant = serde::de::IgnoredAny;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Template {
    name: String,
    guest: Option<String>,
    linux: Option<String>,
    #[serde(default)]
    dirs: Vec<PathBuf>,
    #[serde(default)]
    net: Vec<NetGrant>,
    #[serde(default)]
    warm: Vec<String>,
    setup: Option<String>,
    library: Option<PathBuf>,
    images: Option<Vec<String>>,
    language: Option<String>,
    memory_mib: Option<u64>,
    files_mib: Option<u64>,
    cpu_limit: Option<Time>,
    generation: Option<String>,
}

/// Sets `place` to a given value.
fn set<T>(place: &mut T, given: Option<T>) {
    if let Some(given) = given {
        *place = given;
    }
}

/// A call of a warm-up: `F`, or `F:ARG,ARG`.
fn warm_call(text: &str) -> Call {
    let (name, arguments) = text.split_once(':').unwrap_or((text, ""));
    Call::text(name, arguments.split(',').filter(|argument| !argument.is_empty()))
}

/// The path of a guest file from the current directory: unchanged if it is the name of a remote or
/// absolute, else relative to the directory of the configuration.
fn seen_from(dir: &Path, reference: &str) -> String {
    if reference.contains("://") || Path::new(reference).is_absolute() {
        return reference.to_owned();
    }
    dir.join(reference).to_string_lossy().into_owned()
}

/// The file of a program, and the directories of its installation. One word is looked for where
/// shells look.
fn program_of(dir: &Path, program: &str) -> (String, Vec<PathBuf>) {
    #[cfg(linux_guests)]
    if !program.contains('/')
        && let Ok(found) = afresh::linux::HostProgram::find(program)
    {
        return (found.path.to_string_lossy().into_owned(), found.folders);
    }
    (seen_from(dir, program), Vec::new())
}

impl Guest {
    fn config(self, dir: &Path, open: &Options) -> GuestConfig {
        let mut config = GuestConfig::new(seen_from(dir, &self.guest));
        let route = self.route.unwrap_or(config.route);
        config.name = self.name.unwrap_or_else(|| route.clone());
        config.route = route;
        config.host = self.host;
        config.open = self.warm.iter().fold(open.clone(), |open, call| open.warm(warm_call(call)));
        let mut wasm =
            GuestOptions { mode: self.mode.map_or(Mode::Fresh, |mode| mode.0), ..config.wasm };
        wasm.wasi.env = self.env.into_iter().collect();
        config.wasm = wasm;
        set(&mut config.call, self.call);
        set(&mut config.content_type, self.content_type);
        set(&mut config.timeout, self.timeout.map(|time| time.0));
        set(&mut config.memory, self.memory_mib.map(|mib| mib.saturating_mul(1 << 20)));
        set(&mut config.max_body, self.max_body_kib.map(|kib| kib.saturating_mul(1 << 10)));
        set(&mut config.max_concurrent_requests, self.max_concurrent_requests);
        set(&mut config.max_waiting_requests, self.max_waiting_requests);
        set(&mut config.max_instance_reuse_count, self.max_instance_reuse_count);
        set(&mut config.idle_instance_timeout, self.idle_instance_timeout.map(|time| time.0));
        config
    }
}

#[cfg(feature = "fleet")]
impl Fleet {
    fn config(self, dir: &Path) -> crate::fleet::FleetConfig {
        let mut config = crate::fleet::FleetConfig::new(self.nats);
        let seen = |file: Option<PathBuf>| file.map(|file| dir.join(file));
        config.credentials = seen(self.credentials);
        config.ca = seen(self.ca);
        config.certificate = seen(self.certificate);
        config.certificate_key = seen(self.certificate_key);
        config.entry_key = seen(self.entry_key);
        set(&mut config.require_sealed, self.require_sealed);
        config.store = self.store.map(|store| seen_from(dir, &store));
        set(&mut config.fleet, self.fleet);
        config.name = self.name;
        set(&mut config.lease, self.lease.map(|time| time.0));
        set(&mut config.replicas, self.replicas);
        config
    }
}

impl Sandboxes {
    fn config(self, dir: &Path, open: &Options) -> Result<SandboxConfig, ManifestError> {
        let mut config = SandboxConfig::new(dir.join(&self.store));
        config.keys = Keys::read(&dir.join(self.keys.get_ref()))?;
        #[cfg(feature = "oidc")]
        {
            let issuers: Vec<crate::OidcConfig> =
                self.oidc.into_iter().map(|table| table.into_inner().into()).collect();
            crate::OidcConfig::check_all(&issuers)
                .map_err(|fault| ManifestError::Issuer { fault })?;
            config.keys = config.keys.with_issuers(issuers);
        }
        set(&mut config.requires_metrics_key, self.require_metrics_key);
        set(&mut config.budgets.window, self.window.map(|time| time.0));
        if let Some(limits) = &self.limits
            && let Some(key) = limits.get_ref().tenant_key()
        {
            return Err(ManifestError::TenantKey { key });
        }
        set(&mut config.budgets.server, self.limits.map(|limits| limits.into_inner().into()));
        set(&mut config.budgets.tenant, self.tenant_limits.map(Limits::from));
        let tenants = self.tenants.into_iter();
        config.budgets.tenants =
            tenants.map(|(name, limits)| (name.into_inner(), limits.into())).collect();
        set(&mut config.max_sandboxes, self.max_sandboxes);
        set(&mut config.max_snapshots, self.max_snapshots);
        set(&mut config.max_running_calls, self.max_running_calls);
        set(&mut config.max_computing_calls, self.max_computing_calls.map(NonZero::get));
        set(&mut config.max_memory, self.max_memory_mib.map(|mib| mib.saturating_mul(1 << 20)));
        set(&mut config.build_images, self.build_images);
        set(&mut config.public_traffic, self.public_traffic);
        set(&mut config.idle_timeout, self.idle_timeout.map(|time| time.0));
        set(&mut config.timeout, self.timeout.map(|time| time.0));
        set(&mut config.call_timeout, self.call_timeout.map(|time| time.0));
        config.cpu_limit = self.cpu_limit.map(|time| time.0);
        for template in self.template.into_iter().map(Spanned::into_inner) {
            let ((guest, folders), linux) = match (&template.guest, &template.linux) {
                (Some(guest), None) => ((seen_from(dir, guest), Vec::new()), false),
                (None, Some(program)) => (program_of(dir, program), true),
                _ => return Err(ManifestError::Guest { template: template.name }),
            };
            if !linux && !template.net.is_empty() {
                return Err(ManifestError::Net { template: template.name });
            }
            let mut own = SandboxTemplate::new(template.name, guest, open.clone());
            own.linux = linux;
            #[cfg(linux_guests)]
            {
                own.net = template.net;
            }
            own.dirs = template.dirs.iter().map(|given| dir.join(given)).chain(folders).collect();
            own.warm = template.warm.iter().map(|call| warm_call(call)).collect();
            own.setup = template.setup;
            own.library = template.library.map(|library| dir.join(library));
            set(&mut own.images, template.images);
            set(&mut own.language, template.language);
            set(&mut own.files, template.files_mib.map(|mib| mib.saturating_mul(1 << 20)));
            set(&mut own.memory, template.memory_mib.map(|mib| mib.saturating_mul(1 << 20)));
            own.cpu_limit = template.cpu_limit.map(|time| time.0);
            own.generation = template.generation;
            config.templates.push(own);
        }
        Ok(config)
    }
}

impl Config {
    /// Reads the file at `path`. Guests are opened with `open`: the cache, and demands on
    /// snapshots.
    ///
    /// # Errors
    /// [`ManifestError`], with the line and the key.
    pub fn read(path: &Path, open: &Options) -> Result<Self, ManifestError> {
        let read = |source| ManifestError::Read { path: path.to_owned(), source };
        let text = std::fs::read_to_string(path).map_err(read)?;
        let file: File = toml::from_str(&text).map_err(|source| ManifestError::Parse {
            path: path.to_owned(),
            source: Box::new(source),
        })?;
        let dir = path.parent().unwrap_or(Path::new(""));
        let mut config = Self::default();
        set(&mut config.addr, file.addr);
        config.admin = file.admin;
        set(&mut config.max_concurrent_requests, file.max_concurrent_requests);
        set(&mut config.max_concurrent_connections, file.max_concurrent_connections);
        set(
            &mut config.max_buffered_bytes,
            file.max_buffered_mib.map(|mib| mib.saturating_mul(1 << 20)),
        );
        config.max_connections_per_address = file.max_connections_per_address;
        config.max_requests_per_address = file.max_requests_per_address;
        set(&mut config.forwarded_for, file.forwarded_for);
        match (file.audit, file.audit_required) {
            (Some(audit), required) => {
                let mut audit = AuditConfig::new(dir.join(audit));
                set(&mut audit.required, required);
                config.audit = Some(audit);
            }
            (None, None) => {}
            (None, Some(_)) => return Err(ManifestError::Audit { path: path.to_owned() }),
        }
        set(&mut config.head_timeout, file.head_timeout.map(|time| time.0));
        set(&mut config.body_timeout, file.body_timeout.map(|time| time.0));
        set(&mut config.drain, file.drain.map(|time| time.0));
        set(&mut config.grace, file.grace.map(|time| time.0));
        let guests = file.guest.into_iter().map(Spanned::into_inner);
        config.guests = guests.map(|guest| guest.config(dir, open)).collect();
        config.sandboxes = match file.sandboxes {
            Some(sandboxes) => Some(sandboxes.config(dir, open)?),
            None => None,
        };
        #[cfg(feature = "fleet")]
        {
            config.fleet = file.fleet.map(|fleet| fleet.config(dir));
        }
        #[cfg(feature = "tls")]
        match (file.tls_cert, file.tls_key) {
            (Some(certificate), Some(key)) => {
                let (certificate, key) = (dir.join(certificate.get_ref()), dir.join(key.get_ref()));
                config.tls = Some(crate::tls::TlsConfig { certificate, key });
                if let Some(sandboxes) = &mut config.sandboxes {
                    sandboxes.https = true;
                }
            }
            (None, None) => {}
            _ => return Err(ManifestError::Half { path: path.to_owned() }),
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config, ManifestError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serve.toml");
        std::fs::write(&path, text).unwrap();
        Config::read(&path, &Options::new())
    }

    #[test]
    fn every_key_arrives_where_it_belongs() {
        let config = read(
            r#"
            addr = "127.0.0.1:0"
            max-concurrent-requests = 4
            max-buffered-mib = 2
            grace = "1500ms"
            [[guest]]
            guest = "js.wasm"
            route = "/js"
            host = "a.example"
            mode = "reset"
            timeout = 2
            memory-mib = 3
            max-body-kib = 4
            max-waiting-requests = 5
            max-instance-reuse-count = 6
            idle-instance-timeout = "7ms"
            env = { A = "b" }
            [[guest]]
            guest = "s3://bucket/warm@1"
            name = "second"
            "#,
        )
        .unwrap();
        assert_eq!(config.max_concurrent_requests, 4);
        assert_eq!(config.max_buffered_bytes, 2 << 20);
        assert_eq!(config.grace, Duration::from_millis(1500));
        let [js, second] = &config.guests[..] else { panic!("{:?}", config.guests) };
        assert!(js.reference.ends_with("/js.wasm") && js.reference.starts_with('/'));
        assert_eq!((js.name.as_str(), js.route.as_str()), ("/js", "/js"));
        assert_eq!(js.host.as_deref(), Some("a.example"));
        assert_eq!(js.wasm.mode, Mode::Reset);
        assert_eq!(js.wasm.wasi.env, [("A".to_owned(), "b".to_owned())]);
        assert_eq!((js.timeout, js.memory), (Duration::from_secs(2), 3 << 20));
        assert_eq!((js.max_body, js.max_waiting_requests), (4 << 10, 5));
        assert_eq!(js.max_instance_reuse_count, 6);
        assert_eq!(js.idle_instance_timeout, Duration::from_millis(7));
        assert_eq!(second.reference, "s3://bucket/warm@1");
        assert_eq!((second.name.as_str(), second.route.as_str()), ("second", "/"));
        assert_eq!(second.wasm.mode, Mode::Fresh);
    }

    #[test]
    fn limits_arrive_at_tenants_and_at_the_server() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("keys"), "acme key-1\n").unwrap();
        let path = dir.path().join("serve.toml");
        let text = r#"
            audit = "audit.log"
            audit-required = true
            max-connections-per-address = 5
            max-requests-per-address = 600
            forwarded-for = true
            [sandboxes]
            keys = "keys"
            store = "store"
            window = "60s"
            require-metrics-key = true
            [sandboxes.limits]
            max-stored-mib = 1000
            [sandboxes.tenant-limits]
            max-memory-mib = 64
            cpu-seconds = 10
            weight = 2
            [sandboxes.tenants.acme]
            max-sandboxes = 3
            sent-mib = 7
            "#;
        std::fs::write(&path, text).unwrap();
        let config = Config::read(&path, &Options::new()).unwrap();
        assert!(config.audit.is_some_and(|one| one.required && one.path.ends_with("audit.log")));
        assert_eq!(config.max_connections_per_address, Some(5));
        assert_eq!(config.max_requests_per_address, Some(600));
        let sandboxes = config.sandboxes.unwrap();
        assert!(config.forwarded_for && sandboxes.requires_metrics_key);
        let budgets = &sandboxes.budgets;
        assert_eq!(budgets.window, Duration::from_secs(60));
        assert_eq!(budgets.server.stored, Some(1000 << 20));
        assert_eq!(budgets.tenant.memory, Some(64 << 20));
        assert_eq!(budgets.tenant.cpu_time, Some(Duration::from_secs(10)));
        let own = &budgets.tenants["acme"];
        assert_eq!((own.sandboxes, own.sent, own.weight), (Some(3), Some(7 << 20), None));
        std::fs::write(&path, text.replace("weight = 2", "weight = 0")).unwrap();
        let error = Config::read(&path, &Options::new()).unwrap_err();
        assert!(format!("{error:?}").contains("from 1 to 1000"), "{error:?}");
        std::fs::write(&path, text.replace("max-stored-mib = 1000", "weight = 3")).unwrap();
        let error = Config::read(&path, &Options::new()).unwrap_err().to_string();
        assert!(error.contains("`weight`") && error.contains("tenant-limits"), "{error}");
        std::fs::write(&path, "audit-required = true").unwrap();
        assert!(matches!(Config::read(&path, &Options::new()), Err(ManifestError::Audit { .. })));
    }

    #[test]
    fn unknown_keys_are_named() {
        let why = |text| format!("{:?}", read(text).unwrap_err());
        assert!(why("adr = 1").contains("adr"));
        assert!(why("[[guest]]\nguest = \"x\"\ntimeout = \"3h\"").contains("unit"));
        assert!(why("[[guest]]\nroute = \"/\"").contains("guest"));
    }
}
