//! Values of options with units: times and sizes.

/// A time in milliseconds: a number of them, or one with `ms`, `s`, `m` or `h` behind it.
pub(crate) fn milliseconds(text: &str) -> Result<u64, String> {
    scaled(text, &[("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)])
        .ok_or_else(|| "give a number of milliseconds, or a time as `10s`, `500ms` or `2m`".into())
}

/// A size in MiB: a number of them, or one with `MiB`, `GiB` or `TiB` behind it.
pub(crate) fn mebibytes(text: &str) -> Result<u64, String> {
    scaled(text, &[("MiB", 1), ("GiB", 1 << 10), ("TiB", 1 << 20)])
        .ok_or_else(|| "give a number of MiB, or a size as `64MiB` or `2GiB`".into())
}

/// A number times its unit. Without a unit it is as it is.
fn scaled(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit = match unit.trim_start() {
        "" => 1,
        unit => units.iter().find(|(name, _)| *name == unit)?.1,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_has_the_usual_unit_or_its_own() {
        assert_eq!(milliseconds("250"), Ok(250));
        assert_eq!(milliseconds("250ms"), Ok(250));
        assert_eq!(milliseconds("2 s"), Ok(2000));
        assert_eq!(milliseconds("2m"), Ok(120_000));
        assert_eq!(mebibytes("64"), Ok(64));
        assert_eq!(mebibytes("64MiB"), Ok(64));
        assert_eq!(mebibytes("2GiB"), Ok(2048));
        for wrong in ["", "s", "-1", "1x", "1.5s", "99999999999999999999", "18446744073709551615h"]
        {
            assert!(milliseconds(wrong).unwrap_err().contains("`10s`"), "{wrong}");
        }
        assert!(mebibytes("64MB").unwrap_err().contains("`64MiB`"));
    }
}
