//! Lists of the control plane in E2B's shape: sandboxes and snapshots of a tenant, with filters, an
//! order and pages.
//!
//! Promises: a filter that is not known is an error. The next page begins behind the last item of
//! the page before, also if that item was removed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::{Query, State};
use hyper::StatusCode;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use crate::error_response::ErrorResponse;
use crate::sandbox::http::authorization::Tenant;
use crate::sandbox::http::control::detailed;
use crate::sandbox::http::response::{Answer, answer};
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
use crate::sandbox::records::record::{SnapshotRecord, milliseconds};

type All = State<Arc<Sandboxes>>;
type Pairs = Query<Vec<(String, String)>>;

/// Maximum sandboxes or snapshots of one page.
const MAX_PAGE_ITEMS: usize = 100;

/// The header with the maximum number of sandboxes that a list lacks because their entries in the
/// ledger of the fleet cannot be read, or are beyond the maximum of a list.
const UNREADABLE: &str = "x-afresh-unreadable";

/// A list that a client asks for.
#[derive(Debug, Default, PartialEq, Eq)]
struct Listing {
    limit: Option<usize>,
    /// The last item of the page before.
    after: Option<String>,
    states: Vec<String>,
    metadata: BTreeMap<String, String>,
    /// Milliseconds since 1970.
    started_after: Option<u64>,
    template: Option<String>,
    oldest_first: bool,
    sandbox: Option<String>,
    name: Option<String>,
}

fn bad(message: String) -> ErrorResponse {
    ErrorResponse::new(StatusCode::BAD_REQUEST, message)
}

/// Text without its escapes in URLs.
fn unescaped(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

/// A time as RFC 3339 writes it, with any offset.
fn moment(text: &str) -> Option<u64> {
    // A plus that was not escaped arrives as a space.
    let text = text.replace(' ', "+");
    let (time, seconds) = match text.len().checked_sub(6).and_then(|at| text.split_at_checked(at)) {
        Some((time, offset)) if offset.starts_with(['+', '-']) => {
            let (hours, minutes) = offset[1..].split_once(':')?;
            let seconds = hours.parse::<i64>().ok()? * 3600 + minutes.parse::<i64>().ok()? * 60;
            (time, if offset.starts_with('-') { -seconds } else { seconds })
        }
        _ => (text.trim_end_matches(['Z', 'z']), 0),
    };
    let time: SystemTime = humantime::parse_rfc3339(&format!("{time}Z")).ok()?;
    milliseconds(time).checked_add_signed(-seconds * 1000)
}

impl Listing {
    fn read(pairs: Vec<(String, String)>, known: &[&str]) -> Result<Self, ErrorResponse> {
        let mut listing = Self::default();
        for (name, value) in pairs {
            if !known.contains(&name.as_str()) {
                let message = format!("`{name}` is not supported here; {} are", known.join(", "));
                return Err(bad(message));
            }
            let wrong = || bad(format!("`{name}` cannot be `{value}`"));
            match name.as_str() {
                "limit" => {
                    let limit =
                        value.parse().ok().filter(|limit| (1..=MAX_PAGE_ITEMS).contains(limit));
                    let wrong =
                        || bad(format!("`limit` is from 1 to {MAX_PAGE_ITEMS}, and not `{value}`"));
                    listing.limit = Some(limit.ok_or_else(wrong)?);
                }
                "nextToken" => listing.after = Some(value),
                "state" => {
                    let states = value.split(',').filter(|state| !state.is_empty());
                    for state in states {
                        if !["running", "paused"].contains(&state) {
                            return Err(wrong());
                        }
                        listing.states.push(state.to_owned());
                    }
                }
                "metadata" => {
                    for pair in value.split('&').filter(|pair| !pair.is_empty()) {
                        let (label, value) = pair.split_once('=').ok_or_else(wrong)?;
                        // Clients escape them twice.
                        let plain = |text: &str| unescaped(&unescaped(&text.replace('+', " ")));
                        listing.metadata.insert(plain(label), plain(value));
                    }
                }
                "startedAfter" => listing.started_after = Some(moment(&value).ok_or_else(wrong)?),
                "template" => listing.template = Some(value),
                "order" => {
                    listing.oldest_first = match value.as_str() {
                        "asc" => true,
                        "desc" => false,
                        _ => return Err(wrong()),
                    }
                }
                "sandboxID" => listing.sandbox = Some(value),
                _ => listing.name = Some(value),
            }
        }
        Ok(listing)
    }

    fn has(&self, sandbox: &Sandbox) -> bool {
        let state = if sandbox.is_paused() { "paused" } else { "running" };
        let labels = &sandbox.settings.metadata;
        (self.states.is_empty() || self.states.iter().any(|wanted| wanted == state))
            && self.metadata.iter().all(|(name, value)| labels.get(name) == Some(value))
            && self.started_after.is_none_or(|after| milliseconds(sandbox.started) >= after)
            && self.template.as_ref().is_none_or(|wanted| *wanted == sandbox.template)
    }

    /// One page of a list in its order, and the start of the next. `key` is the place of an item.
    fn page<T>(
        &self,
        mut items: Vec<T>,
        key: impl Fn(&T) -> (u64, String),
    ) -> Result<(Vec<T>, Option<String>), ErrorResponse> {
        items.sort_by_key(&key);
        if !self.oldest_first {
            items.reverse();
        }
        if let Some(after) = &self.after {
            let wrong = || bad(format!("`nextToken` cannot be `{after}`"));
            let (time, id) = after.split_once('-').ok_or_else(wrong)?;
            let after = (time.parse().map_err(|_| wrong())?, id.to_owned());
            items.retain(|item| match self.oldest_first {
                true => key(item) > after,
                false => key(item) < after,
            });
        }
        let most = self.limit.unwrap_or(MAX_PAGE_ITEMS);
        let more = items.len() > most;
        items.truncate(most);
        let next = items.last().filter(|_| more).map(|last| {
            let (time, id) = key(last);
            format!("{time}-{id}")
        });
        Ok((items, next))
    }
}

fn paged(items: Vec<Value>, next: Option<String>) -> Answer {
    let mut response = answer(StatusCode::OK, &Value::Array(items));
    if let Some(next) = next.and_then(|next| next.parse().ok()) {
        response.headers_mut().insert("x-next-token", next);
    }
    Ok(response)
}

/// The sandboxes of a tenant, newest first.
pub(crate) async fn list(State(all): All, Tenant(tenant): Tenant, Query(pairs): Pairs) -> Answer {
    let known = ["limit", "metadata", "nextToken", "order", "startedAfter", "state", "template"];
    let listing = Listing::read(pairs, &known)?;
    let (mut own, unreadable) = all.list(&tenant).await?;
    own.retain(|sandbox| listing.has(sandbox));
    let key = |sandbox: &Arc<Sandbox>| (milliseconds(sandbox.started), sandbox.id.clone());
    let (own, next) = listing.page(own, key)?;
    let mut response = paged(own.iter().map(|sandbox| detailed(&all, sandbox)).collect(), next)?;
    if unreadable > 0 {
        response.headers_mut().insert(UNREADABLE, unreadable.into());
    }
    Ok(response)
}

/// The snapshots of a tenant.
pub(crate) async fn snapshots(
    State(all): All,
    Tenant(tenant): Tenant,
    Query(pairs): Pairs,
) -> Answer {
    let listing = Listing::read(pairs, &["limit", "name", "nextToken", "sandboxID"])?;
    let listing = Listing { oldest_first: true, ..listing };
    let mut own = all.snapshots(&tenant).await?;
    own.retain(|record| {
        let named = |name: &String| record.id == *name || record.names.contains(name);
        !record.is_layer()
            && record.built.is_none()
            && listing.sandbox.as_ref().is_none_or(|id| record.sandbox == *id)
            && listing.name.as_ref().is_none_or(named)
    });
    let (own, next) = listing.page(own, |record| (0, record.id.clone()))?;
    let said = |record: &SnapshotRecord| json!({"snapshotID": record.id, "names": record.names});
    paged(own.iter().map(said).collect(), next)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Listing, ErrorResponse> {
        let pairs = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let known =
            ["limit", "metadata", "nextToken", "order", "startedAfter", "state", "template"];
        Listing::read(pairs.collect(), &known)
    }

    #[test]
    fn filters_are_read_as_clients_write_them() {
        let listing = read(&[
            ("metadata", "who%2520am=a%252Bb&team=x"),
            ("state", "running,paused"),
            ("startedAfter", "2026-01-01T01:00:00.500+01:00"),
            ("order", "asc"),
            ("limit", "7"),
        ]);
        let listing = listing.unwrap();
        assert_eq!(listing.metadata["who am"], "a+b");
        assert_eq!((listing.metadata.len(), listing.states.len()), (2, 2));
        assert_eq!(listing.started_after, Some(1_767_225_600_500));
        assert_eq!(moment("2026-01-01T00:00:00.5Z"), Some(1_767_225_600_500));
        assert!(listing.oldest_first && listing.limit == Some(7));
        for wrong in [
            ("metadata", "x"),
            ("state", "gone"),
            ("order", "up"),
            ("limit", "0"),
            ("limit", "101"),
            ("startedAfter", "soon"),
            ("colour", "red"),
        ] {
            assert!(read(&[wrong]).is_err(), "{wrong:?}");
        }
        assert_eq!(unescaped("%e4%2%zz%C3%A4%"), "\u{fffd}%2%zzä%");
    }

    #[test]
    fn a_saved_sandbox_whose_life_is_over_is_listed_as_paused() {
        let record = json!({
            "id": "s", "tenant": "t", "template": "x", "token": "", "metadata": {}, "started": 1, "ends": 2,
            "paused": false, "pause_at_end": true, "runs": 0,
        });
        let sandbox = Sandbox::recorded(serde_json::from_value(record).unwrap());
        assert!(read(&[("state", "paused")]).unwrap().has(&sandbox));
        assert!(!read(&[("state", "running")]).unwrap().has(&sandbox));
        // One that still runs, or will be removed at its end, is not.
        sandbox.lifetime().pause_at_end = false;
        assert!(!sandbox.is_paused());
        sandbox.lifetime().pause_at_end = true;
        let _call = sandbox.life.try_lock().unwrap();
        assert!(!sandbox.is_paused());
    }

    #[test]
    fn pages_have_each_item_once_though_others_go() {
        for order in ["asc", "desc"] {
            let mut items: Vec<u64> = (0..10).collect();
            let (mut seen, mut token) = (Vec::new(), String::new());
            loop {
                let mut pairs = vec![("limit", "3"), ("order", order)];
                if !token.is_empty() {
                    pairs.push(("nextToken", token.as_str()));
                }
                let listing = read(&pairs).unwrap();
                let key = |item: &u64| (item / 2, format!("id-{item}"));
                let (page, next) = listing.page(items.clone(), key).unwrap();
                // The last item of the page is removed before the next request.
                items.retain(|item| page.last() != Some(item));
                seen.extend(page);
                match next {
                    Some(next) => token = next,
                    None => break,
                }
            }
            if order == "desc" {
                seen.reverse();
            }
            assert_eq!(seen, (0..10).collect::<Vec<_>>(), "{order}");
        }
    }
}
