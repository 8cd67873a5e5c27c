//! The check of a configuration without a server: every fault that its text and the files that it
//! names show.
//!
//! Promises: a fault has the line and the column of its entry. Nothing is opened, listened at or
//! written. A configuration without faults can still fail to start: guests are not compiled, and
//! stores are not asked.

use std::collections::BTreeMap;
use std::fs::File as FsFile;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::{File, LimitsTable, Sandboxes, Template, seen_from};
use crate::config::Config;
use crate::sandbox::Keys;
use toml::Spanned;

/// A fault of a configuration.
#[derive(Debug, thiserror::Error)]
#[error("{}:{line}:{column}: {message}", path.display())]
#[non_exhaustive]
pub struct ConfigFault {
    /// The file of the configuration.
    pub path: PathBuf,
    /// The line, from 1.
    pub line: usize,
    /// The column, from 1, in characters.
    pub column: usize,
    /// The cause, and the way out.
    pub message: String,
}

/// Faults, as they are found.
struct Faults<'a> {
    path: &'a Path,
    text: &'a str,
    dir: &'a Path,
    all: Vec<ConfigFault>,
}

impl Faults<'_> {
    fn add(&mut self, at: &Range<usize>, message: impl Into<String>) {
        let before = self.text.get(..at.start).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        let path = self.path.to_owned();
        self.all.push(ConfigFault { path, line, column, message: message.into() });
    }

    /// The place of `key` within a table, or of the table. Tables keep no places of their values.
    fn within(&self, entry: &Range<usize>, key: &str) -> Range<usize> {
        // The place of a table is that of its header.
        let rest = self.text.get(entry.end..).unwrap_or_default();
        let end = rest.find("\n[").map_or(self.text.len(), |length| entry.end + length);
        let text = self.text.get(entry.start..end).unwrap_or_default();
        let mut start = 0;
        for line in text.split_inclusive('\n') {
            let indent = line.len() - line.trim_start().len();
            let rest = line.trim_start().strip_prefix(key).map(str::trim_start);
            if rest.is_some_and(|rest| rest.starts_with('=')) {
                let at = entry.start + start + indent;
                return at..at + key.len();
            }
            start += line.len();
        }
        entry.clone()
    }

    /// A file that must be readable.
    fn file(&mut self, at: &Range<usize>, what: &str, file: &Path) {
        let path = self.dir.join(file);
        if let Err(error) = FsFile::open(&path) {
            self.add(at, format!("{what} {} cannot be read: {error}", path.display()));
        }
    }

    /// A guest that is a file, and not a name in a store or of a remote.
    fn guest(&mut self, at: &Range<usize>, reference: &str) {
        let seen = seen_from(self.dir, reference);
        if !seen.contains("://") && !reference.contains('@') && !Path::new(&seen).exists() {
            self.add(at, format!("the guest {seen} does not exist"));
        }
    }

    fn guests(&mut self, guests: &[Spanned<super::Guest>]) {
        let mut routes: BTreeMap<(Option<String>, String), usize> = BTreeMap::new();
        let mut names: BTreeMap<String, usize> = BTreeMap::new();
        for guest in guests {
            let (span, guest) = (guest.span(), guest.get_ref());
            let at = self.within(&span, "guest");
            self.guest(&at, &guest.guest);
            let route = guest.route.clone().unwrap_or_else(|| "/".to_owned());
            let at = self.within(&span, "route");
            if !route.starts_with('/') || route.contains(['?', '#']) {
                let why = "a route begins with `/` and has no query";
                self.add(&at, format!("`{route}` is not a route: {why}"));
            }
            let line = self.text.get(..span.start).unwrap_or_default().matches('\n').count() + 1;
            let same = (guest.host.clone(), route.trim_end_matches('/').to_owned());
            if let Some(other) = routes.insert(same, line) {
                let message = format!(
                    "the route `{route}` is also that of the guest in line {other}; give one another route or host"
                );
                self.add(&at, message);
            }
            let name = guest.name.clone().unwrap_or_else(|| route.clone());
            if let Some(other) = names.insert(name.clone(), line) {
                let at = self.within(&span, "name");
                let message = format!(
                    "the name `{name}` is also that of the guest in line {other}; give one another `name`"
                );
                self.add(&at, message);
            }
        }
    }

    fn template(&mut self, span: &Range<usize>, template: &Template) {
        let name = &template.name;
        match (&template.guest, &template.linux) {
            (Some(guest), None) => {
                let at = self.within(span, "guest");
                self.guest(&at, guest);
            }
            (None, Some(_)) => {
                if let Some(reason) = afresh::Kind::Program.missing_reason() {
                    let at = self.within(span, "linux");
                    self.add(&at, reason);
                }
            }
            _ => {
                let message = format!(
                    "the template `{name}` has `guest`, a module or a snapshot, or `linux`, a program: one of them"
                );
                self.add(span, message);
            }
        }
        if template.linux.is_none() && !template.net.is_empty() {
            let at = self.within(span, "net");
            let template = name.clone();
            self.add(&at, crate::error::ManifestError::Net { template }.to_string());
        }
        if let Some(library) = &template.library {
            let at = self.within(span, "library");
            self.file(&at, "the library", library);
        }
        for granted in &template.dirs {
            let granted = self.dir.join(granted);
            if !granted.is_dir() {
                let at = self.within(span, "dirs");
                self.add(&at, format!("{} is not a directory", granted.display()));
            }
        }
    }

    fn sandboxes(&mut self, sandboxes: &Sandboxes) {
        let keys = Keys::read(&self.dir.join(sandboxes.keys.get_ref()));
        match &keys {
            Ok(_) => {}
            Err(error) => {
                let message = afresh::describe_error(error);
                self.add(&sandboxes.keys.span(), message);
            }
        }
        if let Some(limits) = &sandboxes.limits {
            let (span, limits) = (limits.span(), limits.get_ref());
            if let Some(key) = limits.tenant_key() {
                let at = self.within(&span, key);
                self.add(&at, crate::error::ManifestError::TenantKey { key }.to_string());
            }
        }
        #[cfg(feature = "oidc")]
        {
            let mut earlier: Vec<crate::OidcConfig> = Vec::new();
            for issuer in &sandboxes.oidc {
                let config: crate::OidcConfig = issuer.get_ref().clone().into();
                if let Err(fault) = config.check().and_then(|()| config.check_beside(&earlier)) {
                    self.add(&issuer.span(), fault);
                }
                earlier.push(config);
            }
        }
        #[cfg(feature = "oidc")]
        let has_issuers = !sandboxes.oidc.is_empty();
        #[cfg(not(feature = "oidc"))]
        let has_issuers = false;
        for (name, own) in &sandboxes.tenants {
            let known = keys.as_ref().map(|keys| keys.tenants());
            // Tokens may name any tenant.
            if !has_issuers && known.is_ok_and(|known| !known.contains(name.get_ref().as_str())) {
                let message = format!(
                    "the tenant `{}` has limits and no key in {}",
                    name.get_ref(),
                    sandboxes.keys.get_ref().display()
                );
                self.add(&name.span(), message);
            }
            if let Some(server) = &sandboxes.limits {
                for (key, own, all) in pairs(own, server.get_ref()) {
                    if own > all {
                        let message = format!(
                            "`{key}` of the tenant is {own}, and all tenants together have {all}"
                        );
                        self.add(&name.span(), message);
                    }
                }
            }
        }
        let mut names = BTreeMap::new();
        for template in &sandboxes.template {
            let (span, template) = (template.span(), template.get_ref());
            self.template(&span, template);
            let line = self.text.get(..span.start).unwrap_or_default().matches('\n').count() + 1;
            if let Some(other) = names.insert(template.name.as_str(), line) {
                let at = self.within(&span, "name");
                let name = &template.name;
                let message =
                    format!("the name `{name}` is also that of the template in line {other}");
                self.add(&at, message);
            }
        }
        if sandboxes.template.is_empty() {
            let message = "no template is named that sandboxes could be made from; add [[sandboxes.template]]";
            self.add(&sandboxes.keys.span(), message);
        }
    }
}

/// The limits that a tenant and the server both have.
fn pairs(own: &LimitsTable, all: &LimitsTable) -> Vec<(&'static str, u64, u64)> {
    let count = |number: Option<usize>| number.map(|number| number as u64);
    let limits = [
        ("max-sandboxes", count(own.max_sandboxes), count(all.max_sandboxes)),
        ("max-memory-mib", own.max_memory_mib, all.max_memory_mib),
        ("max-stored-mib", own.max_stored_mib, all.max_stored_mib),
        ("max-connections", count(own.max_connections), count(all.max_connections)),
        ("max-running-calls", count(own.max_running_calls), count(all.max_running_calls)),
        ("cpu-seconds", own.cpu_seconds, all.cpu_seconds),
        ("sent-mib", own.sent_mib, all.sent_mib),
        ("outbound-mib", own.outbound_mib, all.outbound_mib),
    ];
    limits.into_iter().filter_map(|(key, own, all)| Some((key, own?, all?))).collect()
}

impl Config {
    /// Every fault of the configuration at `path`, in the order of the file. Guests are not opened.
    #[must_use]
    pub fn check(path: &Path) -> Vec<ConfigFault> {
        let dir = path.parent().unwrap_or(Path::new(""));
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) => {
                let mut faults = Faults { path, text: "", dir, all: Vec::new() };
                faults.add(&(0..0), format!("the file cannot be read: {error}"));
                return faults.all;
            }
        };
        let mut faults = Faults { path, text: &text, dir, all: Vec::new() };
        let file: File = match toml::from_str(&text) {
            Ok(file) => file,
            Err(error) => {
                faults.add(&error.span().unwrap_or(0..0), error.message());
                return faults.all;
            }
        };
        faults.guests(&file.guest);
        if let Some(sandboxes) = &file.sandboxes {
            faults.sandboxes(sandboxes);
        }
        if file.guest.is_empty() && file.sandboxes.is_none() {
            faults.add(&(0..0), "there is nothing to serve: add [[guest]] or [sandboxes]");
        }
        let whole = 0..text.len();
        if file.audit.is_none() && file.audit_required.is_some() {
            let at = faults.within(&whole, "audit-required");
            faults.add(&at, "`audit-required` needs `audit`, the file of the log");
        }
        #[cfg(feature = "tls")]
        match (&file.tls_cert, &file.tls_key) {
            (Some(certificate), Some(key)) => {
                faults.file(&certificate.span(), "the certificate", certificate.get_ref());
                faults.file(&key.span(), "the key", key.get_ref());
            }
            (Some(half), None) | (None, Some(half)) => {
                faults.add(&half.span(), "`tls-cert` and `tls-key` go together");
            }
            (None, None) => {}
        }
        faults.all.sort_by_key(|fault| (fault.line, fault.column));
        faults.all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Vec<(usize, usize, String)> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serve.toml");
        std::fs::write(dir.path().join("keys"), "acme key-1\n").unwrap();
        std::fs::write(dir.path().join("here.wasm"), "").unwrap();
        std::fs::write(&path, text).unwrap();
        let faults = Config::check(&path);
        faults.into_iter().map(|fault| (fault.line, fault.column, fault.message)).collect()
    }

    #[test]
    fn every_fault_has_its_line_and_column() {
        let text = r#"audit-required = true
[[guest]]
guest = "here.wasm"
[[guest]]
  guest = "missing.wasm"
  route = "/"
[sandboxes]
keys = "no-keys"
store = "store"
[[sandboxes.template]]
name = "both"
guest = "here.wasm"
linux = "sh"
[[sandboxes.template]]
name = "both"
guest = "here.wasm"
"#;
        let faults = check(text);
        let places: Vec<_> = faults.iter().map(|(line, column, _)| (*line, *column)).collect();
        assert_eq!(
            places,
            [(1, 1), (4, 1), (5, 3), (6, 3), (8, 8), (10, 1), (15, 1)],
            "{faults:?}"
        );
        for (fault, part) in faults.iter().zip([
            "needs `audit`",
            "name `/` is also",
            "missing.wasm does not exist",
            "route `/` is also",
            "no-keys",
            "one of them",
            "name `both` is also",
        ]) {
            assert!(fault.2.contains(part), "{part}: {fault:?}");
        }
    }

    #[cfg(linux_guests)]
    #[test]
    fn rules_for_connections_are_checked_in_their_place() {
        let with = |guest: &str, net: &str| {
            check(&format!(
                "[sandboxes]\nkeys = \"keys\"\nstore = \"s\"\n[[sandboxes.template]]\nname = \"a\"\n{guest}\n\
                 net = [{net}]\n"
            ))
        };
        let rule = r#"{ to = "api.test:443", methods = ["GET"], paths = ["/v1/**"] }"#;
        assert_eq!(with(r#"linux = "sh""#, &format!(r#""a.test:1", {rule}"#)), []);
        for (guest, net, part) in [
            (r#"guest = "here.wasm""#, rule, "give it `linux`"),
            (
                r#"linux = "sh""#,
                r#"{ to = "api.test:443", method = "GET" }"#,
                "unknown field `method`",
            ),
            (r#"linux = "sh""#, r#"{ to = "api.test:*" }"#, "needs a port"),
            (r#"linux = "sh""#, "1", "a table with `to`"),
        ] {
            let faults = with(guest, net);
            assert_eq!(faults[0].0, 7, "{faults:?}");
            assert!(faults[0].2.contains(part), "{part}: {faults:?}");
        }
    }

    #[cfg(not(linux_guests))]
    #[test]
    fn a_build_without_linux_programs_refuses_their_rules_for_connections_by_name() {
        let with = |guest: &str| {
            check(&format!(
                "[sandboxes]\nkeys = \"keys\"\nstore = \"s\"\n[[sandboxes.template]]\nname = \"a\"\n{guest}\n\
                 net = [\"a.test:1\", {{ to = \"b.test:2\" }}]\n"
            ))
        };
        let reason = afresh::Kind::Program.missing_reason().unwrap();
        for (guest, line, part) in [
            (r#"linux = "sh""#, 6, reason.as_str()),
            (r#"guest = "here.wasm""#, 7, "has `net`, which Linux programs alone can have"),
        ] {
            let faults = with(guest);
            assert_eq!((faults.len(), faults[0].0), (1, line), "{faults:?}");
            assert!(faults[0].2.contains(part), "{part}: {faults:?}");
        }
    }

    #[test]
    fn a_fault_of_the_text_has_a_place_and_a_right_file_has_no_fault() {
        let faults = check("addr = \"127.0.0.1:0\"\nadr = 1\n");
        assert_eq!((faults[0].0, faults[0].1), (2, 1), "{faults:?}");
        assert!(faults[0].2.contains("unknown field `adr`"), "{faults:?}");
        let faults = check("[[guest]]\nguest = \"here.wasm\"\ntimeout = \"3h\"\n");
        assert_eq!((faults[0].0, faults[0].1), (3, 11), "{faults:?}");
        assert!(check("[[guest]]\nguest = \"here.wasm\"\n").is_empty());
        let tenants = "[sandboxes]\nkeys = \"keys\"\nstore = \"s\"\n[sandboxes.limits]\nsent-mib = 5\n\
                       [sandboxes.tenants.acme]\nsent-mib = 6\n[sandboxes.tenants.nobody]\n\
                       [[sandboxes.template]]\nname = \"a\"\nguest = \"here.wasm\"\n";
        let faults = check(tenants);
        let places: Vec<_> = faults.iter().map(|(line, column, _)| (*line, *column)).collect();
        assert_eq!(places, [(6, 20), (8, 20)], "{faults:?}");
        assert!(faults[0].2.contains("all tenants together have 5"), "{faults:?}");
        assert!(faults[1].2.contains("no key"), "{faults:?}");
    }
}
