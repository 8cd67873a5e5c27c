//! Conditions of a status.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// The sandbox serves requests.
pub const READY: &str = "Ready";
/// The sandbox has ended and will not run again.
pub const FINISHED: &str = "Finished";
/// The sandbox is paused by its specification.
pub const SUSPENDED: &str = "Suspended";
/// Maximum bytes of a message.
const MAX_MESSAGE_BYTES: usize = 2048;

/// Sets a condition. The time of its transition changes only with its status.
pub fn set(
    conditions: &mut Vec<Condition>,
    kind: &str,
    is_true: bool,
    reason: &str,
    message: &str,
    generation: Option<i64>,
) {
    let status = if is_true { "True" } else { "False" };
    let before = find(conditions, kind).filter(|found| found.status == status);
    let since = before.map_or_else(|| Time(now()), |found| found.last_transition_time.clone());
    let end = message.floor_char_boundary(MAX_MESSAGE_BYTES);
    let condition = Condition {
        last_transition_time: since,
        message: message[..end].to_owned(),
        observed_generation: generation,
        reason: reason.to_owned(),
        status: status.to_owned(),
        type_: kind.to_owned(),
    };
    match conditions.iter_mut().find(|found| found.type_ == kind) {
        Some(found) => *found = condition,
        None => conditions.push(condition),
    }
}

/// Removes a condition.
pub fn remove(conditions: &mut Vec<Condition>, kind: &str) {
    conditions.retain(|found| found.type_ != kind);
}

/// The condition of a type.
#[must_use]
pub fn find<'a>(conditions: &'a [Condition], kind: &str) -> Option<&'a Condition> {
    conditions.iter().find(|found| found.type_ == kind)
}

/// Whether a condition is true.
#[must_use]
pub fn is_true(conditions: &[Condition], kind: &str) -> bool {
    find(conditions, kind).is_some_and(|found| found.status == "True")
}

/// The present time in whole seconds, as the API stores it.
fn now() -> Timestamp {
    Timestamp::from_second(Timestamp::now().as_second()).unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transition_time_changes_with_the_status_alone() {
        let mut all = Vec::new();
        set(&mut all, READY, false, "A", "a", Some(1));
        all[0].last_transition_time = Time(Timestamp::UNIX_EPOCH);
        set(&mut all, READY, false, "B", "b", Some(2));
        assert_eq!(all[0].last_transition_time, Time(Timestamp::UNIX_EPOCH));
        assert_eq!((all[0].reason.as_str(), all[0].observed_generation), ("B", Some(2)));
        set(&mut all, READY, true, "C", &"ä".repeat(4000), None);
        assert_ne!(all[0].last_transition_time, Time(Timestamp::UNIX_EPOCH));
        assert!(all.len() == 1 && all[0].message.len() == MAX_MESSAGE_BYTES);
        remove(&mut all, READY);
        assert!(all.is_empty());
    }
}
