//! Certificates for the hosts of one rule, by an authority that only the guests of this rule trust.
//!
//! Promises: the key of the authority stays in this process, and is never stored. Its certificate
//! is limited to the rule's names (name constraints), so that a guest that trusts it trusts it for
//! these alone.

use std::sync::Arc;

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;

use crate::der;

/// The certificates' times. The authority ends with its process, and guests' clocks may be those of
/// their snapshots.
const NOT_BEFORE: &[u8] = b"000101000000Z";
/// No well-defined end (RFC 5280, 4.1.2.5).
const NOT_AFTER: &[u8] = b"99991231235959Z";
/// The name of every authority.
const ISSUER: &str = "afresh egress rule";

/// A failure of the cryptography of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no key or certificate could be made: the host's source of randomness or its cryptography failed"
)]
pub struct AuthorityError;

impl From<aws_lc_rs::error::Unspecified> for AuthorityError {
    fn from(_: aws_lc_rs::error::Unspecified) -> Self {
        Self
    }
}

/// An authority for the names of one rule.
pub struct Authority {
    key: EcdsaKeyPair,
    certificate: Vec<u8>,
    /// The key of all certificates that it issues.
    server: EcdsaKeyPair,
    server_pkcs8: Vec<u8>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

fn name(common: &str) -> Vec<u8> {
    let pair = [
        der::value(der::OBJECT_ID, der::COMMON_NAME),
        der::value(der::UTF8_STRING, common.as_bytes()),
    ];
    der::group(der::SEQUENCE, &[der::group(der::SET, &[der::group(der::SEQUENCE, &pair)])])
}

fn key_id(key: &EcdsaKeyPair) -> Vec<u8> {
    digest(&SHA256, key.public_key().as_ref()).as_ref()[..20].to_vec()
}

fn new_key() -> Result<(EcdsaKeyPair, Vec<u8>), AuthorityError> {
    let key = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING)?;
    let pkcs8 = key.to_pkcs8v1()?.as_ref().to_vec();
    Ok((key, pkcs8))
}

/// A certificate of `key` for `subject`, signed by `issuer`.
fn issue(
    issuer: &EcdsaKeyPair,
    key: &EcdsaKeyPair,
    subject: &str,
    extensions: &[Vec<u8>],
) -> Result<Vec<u8>, AuthorityError> {
    let random = SystemRandom::new();
    let mut serial = [0; 16];
    aws_lc_rs::rand::fill(&mut serial)?;
    // Positive, and without a leading zero.
    serial[0] = serial[0] & 0x3f | 0x40;
    let algorithm =
        der::group(der::SEQUENCE, &[der::value(der::OBJECT_ID, der::ECDSA_WITH_SHA256)]);
    // Times before 2050 have the short form, and others the long one (RFC 5280, 4.1.2.5).
    let times =
        [der::value(der::UTC_TIME, NOT_BEFORE), der::value(der::GENERALIZED_TIME, NOT_AFTER)];
    let kind = [
        der::value(der::OBJECT_ID, der::EC_PUBLIC_KEY),
        der::value(der::OBJECT_ID, der::PRIME256V1),
    ];
    let public = [der::group(der::SEQUENCE, &kind), der::bit_string(key.public_key().as_ref())];
    let body = der::group(
        der::SEQUENCE,
        &[
            der::value(0xa0, &der::value(der::INTEGER, &[2])),
            der::value(der::INTEGER, &serial),
            algorithm.clone(),
            name(ISSUER),
            der::group(der::SEQUENCE, &times),
            name(subject),
            der::group(der::SEQUENCE, &public),
            der::value(0xa3, &der::group(der::SEQUENCE, extensions)),
        ],
    );
    let signature = issuer.sign(&random, &body)?;
    Ok(der::group(der::SEQUENCE, &[body, algorithm, der::bit_string(signature.as_ref())]))
}

impl Authority {
    /// An authority with new keys for `domain` and the names below it.
    ///
    /// # Errors
    /// When the host has no randomness.
    pub fn new(domain: &str) -> Result<Self, AuthorityError> {
        let (key, _) = new_key()?;
        let (server, server_pkcs8) = new_key()?;
        let permitted = der::group(der::SEQUENCE, &[der::value(0x82, domain.as_bytes())]);
        // A permitted name limits names alone: all addresses of IPv4 and IPv6 are excluded.
        let range = |zeros: &[u8]| der::group(der::SEQUENCE, &[der::value(0x87, zeros)]);
        let excluded = [range(&[0; 8]), range(&[0; 32])];
        let limits = [der::value(0xa0, &permitted), der::group(0xa1, &excluded)];
        let limits = der::group(der::SEQUENCE, &limits);
        let is_authority = [der::value(der::BOOLEAN, &[0xff]), der::value(der::INTEGER, &[0])];
        let extensions = [
            der::extension(der::BASIC_CONSTRAINTS, true, &der::group(der::SEQUENCE, &is_authority)),
            // Signs certificates.
            der::extension(der::KEY_USAGE, true, &der::value(der::BIT_STRING, &[2, 0x04])),
            der::extension(
                der::SUBJECT_KEY_ID,
                false,
                &der::value(der::OCTET_STRING, &key_id(&key)),
            ),
            der::extension(der::NAME_CONSTRAINTS, true, &limits),
        ];
        let certificate = issue(&key, &key, ISSUER, &extensions)?;
        Ok(Self { key, certificate, server, server_pkcs8 })
    }

    /// Its certificate, as PEM.
    #[must_use]
    pub fn certificate_pem(&self) -> String {
        let text = STANDARD.encode(&self.certificate);
        let mut pem = "-----BEGIN CERTIFICATE-----\n".to_owned();
        for line in text.as_bytes().chunks(64) {
            pem.push_str(&String::from_utf8_lossy(line));
            pem.push('\n');
        }
        pem + "-----END CERTIFICATE-----\n"
    }

    /// A certificate for a host, with its key.
    pub(crate) fn certify(&self, host: &str) -> Result<Arc<CertifiedKey>, AuthorityError> {
        let names = der::group(der::SEQUENCE, &[der::value(0x82, host.as_bytes())]);
        let purpose = der::group(der::SEQUENCE, &[der::value(der::OBJECT_ID, der::SERVER_AUTH)]);
        let by = der::group(der::SEQUENCE, &[der::value(0x80, &key_id(&self.key))]);
        let own = der::value(der::OCTET_STRING, &key_id(&self.server));
        let extensions = [
            der::extension(der::BASIC_CONSTRAINTS, true, &der::group(der::SEQUENCE, &[])),
            // Signs handshakes.
            der::extension(der::KEY_USAGE, true, &der::value(der::BIT_STRING, &[7, 0x80])),
            der::extension(der::EXTENDED_KEY_USAGE, false, &purpose),
            der::extension(der::SUBJECT_KEY_ID, false, &own),
            der::extension(der::AUTHORITY_KEY_ID, false, &by),
            // Critical only where there is no subject (RFC 5280, 4.2.1.6).
            der::extension(der::SUBJECT_ALT_NAME, false, &names),
        ];
        // A common name has 64 characters at most; clients read the alternative name.
        let subject: String = host.chars().take(64).collect();
        let certificate = issue(&self.key, &self.server, &subject, &extensions)?;
        let chain = vec![CertificateDer::from(certificate)];
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(self.server_pkcs8.clone()));
        let key =
            rustls::crypto::aws_lc_rs::sign::any_ecdsa_type(&key).map_err(|_| AuthorityError)?;
        Ok(Arc::new(CertifiedKey::new(chain, key)))
    }
}

#[cfg(test)]
mod tests {
    use rustls::RootCertStore;
    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier;
    use rustls::pki_types::{ServerName, UnixTime};

    use super::*;

    #[test]
    fn an_authority_certifies_the_names_of_its_rule_alone() {
        let authority = Authority::new("api.example.org").unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from(authority.certificate.clone())).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
        let trusts = |certificate: &CertificateDer<'_>, name: &str| {
            let name = ServerName::try_from(name.to_owned()).unwrap();
            verifier.verify_server_cert(certificate, &[], &name, &[], UnixTime::now()).is_ok()
        };
        for (name, expected) in
            [("api.example.org", true), ("a.api.example.org", true), ("example.org", false)]
        {
            let key = authority.certify(name).unwrap();
            assert_eq!(trusts(&key.cert[0], name), expected, "{name}");
        }
        let names = der::group(der::SEQUENCE, &[der::value(0x87, &[192, 0, 2, 1])]);
        let names = [der::extension(der::SUBJECT_ALT_NAME, false, &names)];
        let address = issue(&authority.key, &authority.server, "x", &names).unwrap();
        assert!(!trusts(&CertificateDer::from(address), "192.0.2.1"));
    }
}
