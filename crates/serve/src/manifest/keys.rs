//! The tables of the configuration with their keys, from the types that read them.

#[cfg(feature = "fleet")]
use super::Fleet;
#[cfg(feature = "oidc")]
use super::Oidc;
use super::{File, Guest, LimitsTable, Sandboxes, Template};

/// The keys of one table, as its error for an unknown key names them.
fn keys_of<T: serde::de::DeserializeOwned>() -> Vec<String> {
    let Err(error) = toml::from_str::<T>("unknown-key = 1") else { return Vec::new() };
    let expected = error.message().split("expected").nth(1).unwrap_or_default();
    expected.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The tables of the configuration with their keys, for the reference.
#[doc(hidden)]
#[must_use]
pub fn keys() -> Vec<(&'static str, Vec<String>)> {
    vec![
        ("Server", keys_of::<File>()),
        ("Guests", keys_of::<Guest>()),
        ("Sandboxes", keys_of::<Sandboxes>()),
        ("Limits", keys_of::<LimitsTable>()),
        ("Templates", keys_of::<Template>()),
        #[cfg(feature = "oidc")]
        ("Issuers", keys_of::<Oidc>()),
        #[cfg(feature = "fleet")]
        ("Fleet", keys_of::<Fleet>()),
    ]
}
