//! A host's right to answer for its sandboxes: an entry that it renews, and until when it may rely
//! on it.
//!
//! Promises: a host stops relying on its lease before another may break it, for every loss or delay
//! of messages: it counts from when it *sent* the renewal that was acknowledged, others from when
//! they first *saw* it, which is later. May break it: clocks of two hosts that run at speeds which
//! differ by more than the margin, or a machine that is stopped as a whole in a way that its clock
//! does not see.

use std::time::Duration;

use afresh_sys::planted::{Bug, is};

use super::MonotonicTime;

/// Parameters that all hosts of a fleet share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseParameters {
    /// Time for which others must have seen an entry unchanged before they may break it.
    pub time: Duration,
}

impl LeaseParameters {
    /// The safety margin of its owner: a fifth.
    #[must_use]
    pub fn margin(self) -> Duration {
        self.time / 5
    }

    /// Time between renewals: three can fail before the owner has to stop.
    #[must_use]
    pub fn renewal(self) -> Duration {
        self.time / 5
    }
}

/// A host's own lease.
#[derive(Clone, Debug)]
pub struct Lease {
    parameters: LeaseParameters,
    revision: u64,
    until: MonotonicTime,
    broken: bool,
}

impl Lease {
    /// A lease whose entry was made by a request sent at `sent`.
    #[must_use]
    pub fn from_request(parameters: LeaseParameters, revision: u64, sent: MonotonicTime) -> Self {
        let mut lease = Self { parameters, revision, until: MonotonicTime::ZERO, broken: false };
        lease.renewed(revision, sent);
        lease
    }

    /// A renewal that was sent at `sent` was acknowledged.
    pub fn renewed(&mut self, revision: u64, sent: MonotonicTime) {
        self.revision = revision;
        self.until = self.until.max(sent + self.parameters.time - self.parameters.margin());
    }

    /// The entry was read, and is still this host's: a renewal arrived whose acknowledgement did
    /// not. The time of its arrival is unknown, so only the revision for the next renewal is
    /// gained.
    pub fn read_back(&mut self, revision: u64) {
        self.revision = revision;
    }

    /// Another host broke it: it is lost.
    pub fn broken(&mut self) {
        self.broken = true;
    }

    /// Whether the host may answer at `now`.
    #[must_use]
    pub fn safe(&self, now: MonotonicTime) -> bool {
        is(Bug::Lease) || !self.broken && now < self.until
    }

    /// Time for which it may still rely on it.
    #[must_use]
    pub fn remaining(&self, now: MonotonicTime) -> Duration {
        if self.broken { Duration::ZERO } else { self.until.saturating_sub(now) }
    }

    /// Whether it was broken.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// The number of the entry, which the next renewal names.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::super::{FailureDetector, SplitMix64, Verdict};
    use super::*;

    const PARAMETERS: LeaseParameters = LeaseParameters { time: Duration::from_millis(1000) };

    #[test]
    fn a_lease_counts_from_when_its_renewal_was_sent() {
        let at = Duration::from_millis;
        let mut lease = Lease::from_request(PARAMETERS, 7, at(100));
        assert!(lease.safe(at(899)) && !lease.safe(at(900)));
        // Read back: the number is new, the time is not.
        lease.read_back(9);
        assert_eq!(lease.revision(), 9);
        assert!(!lease.safe(at(900)));
        lease.renewed(10, at(950));
        assert!(lease.safe(at(1749)) && !lease.safe(at(1750)));
        // An older one that is acknowledged late takes nothing away.
        lease.renewed(11, at(300));
        assert!(lease.safe(at(1749)));
        lease.broken();
        assert!(!lease.safe(at(1000)) && lease.remaining(at(1000)).is_zero());
    }

    /// A message on its way to the register, or back.
    enum Message {
        Renew { sent: MonotonicTime, expected: u64 },
        Renewed { sent: MonotonicTime, revision: Option<u64> },
        Read,
        Told { revision: u64, broken: bool },
        Break { expected: u64 },
    }

    /// The sender: the owner, or a host that waits for the end.
    #[derive(Clone, Copy, PartialEq)]
    enum Sender {
        Owner,
        Heir,
    }

    /// A register that is changed by compare-and-set, a network that delays, loses and keeps
    /// messages until much later, an owner that is stopped or cut off at times, and an heir. Clocks
    /// run at slightly different speeds.
    fn world(seed: u64) -> (u32, u32) {
        let mut random = SplitMix64::new(seed);
        let mut chance = move |of: usize| random.below(of) == 0;
        let mut delays = SplitMix64::new(seed ^ 0x5555);
        let (mut revision, mut broken) = (1_u64, false);
        let mut owner = Lease::from_request(PARAMETERS, 1, MonotonicTime::ZERO);
        let mut heir = FailureDetector::new(PARAMETERS);
        let (mut owns, mut stopped, mut cut) = (false, 0_u32, 0_u32);
        let mut network: VecDeque<(u64, Sender, Message)> = VecDeque::new();
        let (mut safe, mut taken) = (0, 0);
        for step in 0..20_000_u64 {
            // Milliseconds, by a clock that is up to a twentieth slow or fast.
            let owners = Duration::from_millis(step * 5 * (950 + seed % 50) / 1000);
            let heirs = Duration::from_millis(step * 5 * (1000 + seed % 50) / 1000);
            let mut delay = || {
                let usual = delays.below(1 + seed as usize % 20);
                step + if delays.below(20) == 0 { delays.below(600) } else { usual } as u64
            };
            if stopped == 0 && chance(900) {
                stopped = 400;
            }
            stopped = stopped.saturating_sub(1);
            if cut == 0 && chance(900) {
                cut = 400;
            }
            cut = cut.saturating_sub(1);
            if stopped == 0 && step % 25 == 0 && !owner.is_broken() {
                let renew = Message::Renew { sent: owners, expected: owner.revision() };
                network.push_back((delay(), Sender::Owner, renew));
                if chance(4) {
                    network.push_back((delay(), Sender::Owner, Message::Read));
                }
            }
            if step % 5 == 0 {
                network.push_back((delay(), Sender::Heir, Message::Read));
            }
            for _ in 0..network.len() {
                let Some((due, who, message)) = network.pop_front() else { break };
                let waits = due > step || (who == Sender::Owner && stopped > 0);
                if waits {
                    network.push_back((due, who, message));
                    continue;
                }
                if chance(30) || (who == Sender::Owner && cut > 0) {
                    continue;
                }
                match message {
                    Message::Renew { sent, expected } => {
                        let done = (expected == revision && !broken).then(|| {
                            revision += 1;
                            revision
                        });
                        network.push_back((
                            delay(),
                            who,
                            Message::Renewed { sent, revision: done },
                        ));
                    }
                    Message::Renewed { sent, revision: Some(revision) } => {
                        owner.renewed(owner.revision().max(revision), sent);
                    }
                    Message::Renewed { .. } => network.push_back((delay(), who, Message::Read)),
                    Message::Read => {
                        network.push_back((delay(), who, Message::Told { revision, broken }));
                    }
                    Message::Told { revision, broken } if who == Sender::Owner => {
                        if broken {
                            owner.broken();
                        } else {
                            owner.read_back(owner.revision().max(revision));
                        }
                    }
                    Message::Told { broken: true, .. } => owns = true,
                    Message::Told { revision, .. } => {
                        if let Verdict::Over = heir.observe("owner", revision, heirs) {
                            network.push_back((
                                delay(),
                                who,
                                Message::Break { expected: revision },
                            ));
                        }
                    }
                    Message::Break { expected } => broken |= expected == revision,
                }
            }
            let answers = stopped == 0 && owner.safe(owners);
            assert!(!(answers && (broken || owns)), "seed {seed}, step {step}: two may answer");
            safe += u32::from(answers);
            if owns {
                taken = 1;
                break;
            }
        }
        (safe, taken)
    }

    #[test]
    fn planted_bugs_are_caught() {
        let tests = ["a_lease_counts_from_when_its_renewal_was_sent", WORLD];
        let named = tests.map(|test| format!("fleet::policy::lease::tests::{test}"));
        for test in &named {
            afresh_sys::planted::must_be_caught(&[Bug::Lease], &[test]);
        }
    }

    const WORLD: &str = "no_host_takes_over_from_one_that_still_answers";

    #[test]
    fn no_host_takes_over_from_one_that_still_answers() {
        let (mut safe, mut taken) = (0, 0);
        for seed in 0..300 {
            let (answered, over) = world(seed);
            (safe, taken) = (safe + answered, taken + over);
        }
        // The test is meaningful: hosts do answer for long, and are taken over from.
        assert!(safe > 100_000, "{safe}");
        assert!(taken > 100, "{taken}");
    }
}
