//! Which traces are kept, by the names that OpenTelemetry has for it.

use super::context::Context;

/// How traces are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sampler {
    /// Whether the caller's decision holds.
    parent: bool,
    /// Traces are kept if their number is less than this, of 2^63.
    below: u64,
}

impl Sampler {
    /// `parentbased_always_on`.
    pub(super) const DEFAULT: Self = Self { parent: true, below: 1 << 63 };

    /// The sampler of this name, with its argument; `None` for an unknown name.
    pub(super) fn named(name: &str, argument: Option<&str>) -> Option<Self> {
        let (parent, root) = match name.strip_prefix("parentbased_") {
            Some(root) => (true, root),
            None => (false, name),
        };
        let below = match root {
            "always_on" => 1 << 63,
            "always_off" => 0,
            "traceidratio" => {
                let ratio: f64 = argument.map_or(Ok(1.0), str::parse).ok()?;
                // A ratio of 1 and more keeps all; one below 0 or none at all keeps nothing.
                (ratio.clamp(0.0, 1.0) * (1_u64 << 63) as f64) as u64
            }
            _ => return None,
        };
        Some(Self { parent, below })
    }

    /// Whether a span of this trace is kept.
    pub(super) fn keeps(self, trace: u128, parent: Option<Context>) -> bool {
        match parent {
            Some(parent) if self.parent => parent.sampled,
            // The bits that all OpenTelemetry libraries use, so that each keeps the same traces.
            _ => (trace as u64) >> 1 < self.below,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_kept_as_its_sampler_is_named() {
        let parent = |sampled| Some(Context { trace: 1, span: 1, sampled });
        let keeps = |name, argument, parent| {
            let sampler = Sampler::named(name, argument).unwrap();
            let kept = |n: u128| sampler.keeps(n << 58, parent);
            (0..64).filter(|n| kept(*n)).count()
        };
        assert_eq!(keeps("always_on", None, parent(false)), 64);
        assert_eq!(keeps("always_off", None, parent(true)), 0);
        assert_eq!(keeps("traceidratio", Some("0.25"), parent(true)), 16);
        assert_eq!(keeps("traceidratio", None, None), 64);
        assert_eq!(keeps("parentbased_always_on", None, None), 64);
        assert_eq!(keeps("parentbased_always_on", None, parent(false)), 0);
        assert_eq!(keeps("parentbased_always_off", None, parent(true)), 64);
        assert_eq!(keeps("parentbased_traceidratio", Some("0.5"), None), 32);
        assert!(Sampler::DEFAULT.keeps(u128::MAX, None));
        for (name, argument) in [("jaeger_remote", None), ("traceidratio", Some("half"))] {
            assert!(Sampler::named(name, argument).is_none());
        }
    }
}
