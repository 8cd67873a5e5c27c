//! The tenant whose sandboxes a controller has, noted in an annotation of its lease.
//!
//! A key of another tenant gets a 404 for each sandbox, as if all had ended. Promises: the note is
//! made once a sandbox of an object was found under the tenant, and is never changed. A user who
//! removes the annotation accepts the next tenant.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The annotation.
pub const TENANT_ANNOTATION: &str = "agents.x-k8s.io/afresh-tenant";

#[derive(Debug, Default)]
struct State {
    /// That of the last version of the lease that was read or written.
    noted: Option<String>,
    /// One that is noted with the next renewal of the lease.
    next: Option<String>,
}

/// The note.
#[derive(Debug, Default)]
pub struct TenantNote(Mutex<State>);

impl TenantNote {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A lease with these annotations was read.
    pub fn read(&self, annotations: Option<&BTreeMap<String, String>>) {
        self.state().noted = annotations.and_then(|all| all.get(TENANT_ANNOTATION)).cloned();
    }

    /// Completes the annotations of a lease that is written. Renewals are the only writer, since
    /// another one would take the version from them.
    pub fn exchange(&self, annotations: &mut BTreeMap<String, String>) {
        let mut state = self.state();
        if let (None, Some(next)) = (annotations.get(TENANT_ANNOTATION), state.next.take()) {
            annotations.insert(TENANT_ANNOTATION.to_owned(), next);
        }
        state.noted = annotations.get(TENANT_ANNOTATION).cloned();
    }

    /// Notes the tenant with the next renewal, if none is noted then.
    pub fn note(&self, tenant: &str) {
        self.state().next = Some(tenant.to_owned());
    }

    /// Whether a tenant is noted, or will be.
    #[must_use]
    pub fn is_noted(&self) -> bool {
        let state = self.state();
        state.noted.is_some() || state.next.is_some()
    }

    /// Why the tenant of the key is a wrong one. None of a key of administrators, which has none.
    #[must_use]
    pub fn fault(&self, reported: Option<&str>) -> Option<String> {
        let state = self.state();
        let (noted, reported) = (state.noted.as_deref()?, reported?);
        (noted != reported).then(|| {
            format!(
                "the API key is of the tenant `{reported}`, and the sandboxes of this controller \
                 are of `{noted}`; give it a key of that tenant, or remove the annotation \
                 {TENANT_ANNOTATION} of its lease"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_is_noted_once_and_until_its_annotation_is_removed() {
        let note = TenantNote::default();
        let mut annotations = BTreeMap::new();
        note.exchange(&mut annotations);
        assert!(annotations.is_empty() && !note.is_noted());
        note.note("acme");
        assert!(note.is_noted() && note.fault(Some("other")).is_none(), "not written yet");
        note.exchange(&mut annotations);
        assert_eq!(annotations[TENANT_ANNOTATION], "acme");
        note.note("other");
        note.exchange(&mut annotations);
        assert_eq!(annotations[TENANT_ANNOTATION], "acme");
        let fault = note.fault(Some("other")).expect("it is another one");
        assert!(fault.contains("`acme`") && fault.contains("`other`"), "{fault}");
        assert_eq!((note.fault(Some("acme")), note.fault(None)), (None, None));
        note.read(Some(&BTreeMap::new()));
        assert!(!note.is_noted() && note.fault(Some("other")).is_none());
    }
}
