//! The trust of a guest in the authorities of its egress rules: bundles of certificates, and
//! environment variables.
//!
//! Promises: a guest without such a rule has neither. A guest out of a snapshot trusts the
//! authorities of its opener's rules, in place of those of the process that made the snapshot:
//! their keys were never stored.

use std::ffi::OsString;
use std::path::PathBuf;

use afresh_egress::EgressPolicy;
use afresh_files::{Refused, Time, Tree};

use crate::sentry;

/// The bundle that every such guest has.
const BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";
/// Bundles of other distributions, extended where they exist.
const OTHER_BUNDLES: [&str; 3] =
    ["/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"];
/// Variables that name a bundle.
const VARIABLES: [&str; 4] =
    ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"];
/// The value of a placeholder.
const PLACEHOLDER: &str = "afresh-placeholder";
/// The line that our part of a bundle begins with. It is the last part.
const MARKER: &[u8] = b"# Authorities of egress rules\n";
/// Maximum bytes of a bundle.
const MAX_BUNDLE: u64 = 1 << 20;
/// Bytes of storage that bundles may take, in addition to the guest's own.
pub(crate) const BUNDLE_STORAGE: u64 = 8 << 20;

/// The bundles of a guest with this environment.
fn bundles(tree: &Tree, env: &[(OsString, OsString)]) -> Vec<PathBuf> {
    let named = env.iter().filter(|(name, _)| VARIABLES.iter().any(|one| name == one));
    let named = named.map(|(_, path)| PathBuf::from(path)).filter(|path| path.is_absolute());
    let others = OTHER_BUNDLES.iter().map(PathBuf::from).chain(named);
    let mut found: Vec<PathBuf> =
        others.filter(|path| tree.stat_path(sentry::bytes(path)).is_ok()).collect();
    found.push(PathBuf::from(BUNDLE));
    found.sort();
    found.dedup();
    found
}

/// The bundle without our part.
fn original(bundle: &[u8]) -> &[u8] {
    let at = bundle.windows(MARKER.len()).position(|part| part == MARKER);
    &bundle[..at.unwrap_or(bundle.len())]
}

/// Removes our part from the bundles in `tree`. One that cannot be read has none.
fn remove(tree: &mut Tree, env: &[(OsString, OsString)]) -> Result<(), (PathBuf, Refused)> {
    for path in bundles(tree, env) {
        let bytes = sentry::bytes(&path);
        let Ok(present) = tree.read_path(bytes, MAX_BUNDLE) else { continue };
        let wanted = original(&present);
        if wanted.len() < present.len() {
            let written = tree.write_path(bytes, wanted, Time::default());
            written.map_err(|error| (path.clone(), error))?;
        }
    }
    Ok(())
}

/// Makes the bundles in `tree` name the authorities of `policy`, and no earlier ones.
///
/// # Errors
/// The bundle that cannot be read or written, and the reason.
pub(crate) fn write(
    tree: &mut Tree,
    policy: &EgressPolicy,
    env: &[(OsString, OsString)],
) -> Result<(), (PathBuf, Refused)> {
    let certificates = policy.certificates();
    if certificates.is_empty() {
        return remove(tree, env);
    }
    for path in bundles(tree, env) {
        let bytes = sentry::bytes(&path);
        let present = match tree.read_path(bytes, MAX_BUNDLE) {
            Ok(present) => present,
            Err(Refused::Missing) => Vec::new(),
            Err(error) => return Err((path, error)),
        };
        let mut wanted = original(&present).to_vec();
        if wanted.last().is_some_and(|last| *last != b'\n') {
            wanted.push(b'\n');
        }
        wanted.extend([MARKER, certificates.as_bytes()].concat());
        if wanted != present {
            let written = tree.write_path(bytes, &wanted, Time::default());
            written.map_err(|error| (path.clone(), error))?;
        }
    }
    Ok(())
}

/// Adds the variables that the guest needs for `policy`, unless its opener has set them.
pub(crate) fn extend_environment(env: &mut Vec<(OsString, OsString)>, policy: &EgressPolicy) {
    let has_authorities = !policy.certificates().is_empty();
    let paths = VARIABLES.iter().filter(|_| has_authorities).map(|name| (*name, BUNDLE));
    let placeholders = policy.placeholders().map(|name| (name, PLACEHOLDER));
    for (name, value) in paths.chain(placeholders) {
        if !env.iter().any(|(known, _)| known == name) {
            env.push((name.into(), value.into()));
        }
    }
}

#[cfg(test)]
mod tests {
    use afresh_egress::NetGrant;
    use afresh_files::Budget;

    use super::*;

    #[test]
    fn a_bundle_without_rules_has_no_earlier_authorities() {
        let rule: NetGrant = r#"{"to": "api.example.org:443"}"#.parse().unwrap();
        let policy: EgressPolicy = [rule].into_iter().collect();
        let mut tree = Tree::new(Budget::default());
        tree.make_directories("/etc/ssl/certs", Time::default()).unwrap();
        let path = BUNDLE.as_bytes();
        tree.write_path(path, b"of the image\n", Time::default()).unwrap();
        write(&mut tree, &policy, &[]).unwrap();
        assert!(tree.read_path(path, MAX_BUNDLE).unwrap().ends_with(b"END CERTIFICATE-----\n"));
        write(&mut tree, &EgressPolicy::default(), &[]).unwrap();
        assert_eq!(tree.read_path(path, MAX_BUNDLE).unwrap(), b"of the image\n");
    }
}
