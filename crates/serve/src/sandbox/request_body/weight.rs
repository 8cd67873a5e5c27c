//! The memory that bodies of requests take once they are decoded, per byte, with the byte itself.
//!
//! Promises: a body is charged at least the memory that its decoder takes. The fuzz target `e2b`
//! decodes within these bounds. May break it: a new type of request with smaller items.

/// JSON: the smallest items of lists have three bytes, and take 32 for each while a list grows.
pub(crate) const JSON_WEIGHT: usize = 40;
/// Code without variables: the body, the text, and the text without escapes while it is read.
pub(crate) const CODE_WEIGHT: usize = 3;
/// Files: their names have a limit, and their content stays in the body.
pub(crate) const FILE_WEIGHT: usize = 1;
/// Maximum memory of the variables of a run, which `requests` limits.
pub(crate) const VARIABLES_MEMORY: usize = 2 << 20;

/// The weight of code with variables. Those of a short body may take as much memory as other JSON.
/// A body without a known length may be short.
pub(crate) fn code_weight(len: Option<usize>) -> usize {
    let variables = len.map_or(JSON_WEIGHT, |len| VARIABLES_MEMORY.div_ceil(len.max(1)));
    CODE_WEIGHT.saturating_add(variables).min(JSON_WEIGHT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_code_is_charged_for_its_variables() {
        assert_eq!((code_weight(None), code_weight(Some(0))), (JSON_WEIGHT, JSON_WEIGHT));
        assert_eq!(code_weight(Some(1000)), JSON_WEIGHT);
        assert_eq!(code_weight(Some(VARIABLES_MEMORY)), CODE_WEIGHT + 1);
        for len in [1 << 15, 1 << 17, 1 << 20, 64 << 20] {
            let least = (len * CODE_WEIGHT + VARIABLES_MEMORY).min(len * JSON_WEIGHT);
            assert!(len * code_weight(Some(len)) >= least, "{len}");
        }
    }
}
