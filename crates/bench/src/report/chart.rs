//! Charts as SVG: medians with their spread on a logarithmic scale.

use std::fmt::Write;

use super::Measurement;

const WIDTH: f64 = 360.0;
const LINE_HEIGHT: f64 = 18.0;

/// A logarithmic scale from `low` to `high`, in pixels.
struct Scale {
    low: f64,
    high: f64,
    width: f64,
}

impl Scale {
    /// A scale over all positive values, widened to a factor of at least four.
    fn over(values: impl Iterator<Item = f64>, width: f64) -> Self {
        let (mut low, mut high) = (f64::INFINITY, 0.0f64);
        for value in values.filter(|value| value.is_finite() && *value > 0.0) {
            low = low.min(value);
            high = high.max(value);
        }
        if high <= 0.0 {
            (low, high) = (1.0, 1.0);
        }
        let widen = (4.0 / (high / low)).max(1.0).sqrt() * 1.1;
        Self { low: (low / widen).log10(), high: (high * widen).log10(), width }
    }

    fn position(&self, value: f64) -> f64 {
        let value = value.max(f64::MIN_POSITIVE).log10();
        ((value - self.low) / (self.high - self.low) * self.width).clamp(0.0, self.width)
    }

    /// The powers of ten within the scale.
    fn ticks(&self) -> impl Iterator<Item = f64> + '_ {
        let (first, last) = (self.low.ceil() as i32, self.high.floor() as i32);
        (first..=last).map(|power| 10f64.powi(power))
    }
}

/// One line for each row: a dot at the median, a bar from the minimum to the 99th percentile. A
/// line is as high as a row of the table.
pub(super) fn dots(rows: &[&Measurement]) -> Vec<String> {
    let scale = Scale::over(rows.iter().flat_map(|row| [row.min, row.median, row.p99]), WIDTH);
    let mut charts = Vec::with_capacity(rows.len());
    for row in rows {
        let mut svg = format!(
            r#"<svg role="img" aria-label="{}" width="{WIDTH}" height="{LINE_HEIGHT}" viewBox="0 0 {WIDTH} {LINE_HEIGHT}">"#,
            super::page::escaped(&format!("{} {} {}", row.strategy, row.median, row.unit)),
        );
        for tick in scale.ticks() {
            let x = scale.position(tick);
            // Writing to a string cannot fail.
            let _ = write!(
                svg,
                r#"<line class="tick" x1="{x:.1}" y1="0" x2="{x:.1}" y2="{LINE_HEIGHT}"/>"#
            );
        }
        let [low, middle, high] = [row.min, row.median, row.p99].map(|value| scale.position(value));
        let class = row.side().class();
        let y = LINE_HEIGHT / 2.0;
        let _ = write!(
            svg,
            r#"<line class="{class}" x1="{low:.1}" y1="{y}" x2="{high:.1}" y2="{y}"/><circle class="{class}" cx="{middle:.1}" cy="{y}" r="4"/></svg>"#
        );
        charts.push(svg);
    }
    charts
}

/// The medians of one case by number of threads, one line for each strategy that ran with several.
pub(super) fn threads(rows: &[&Measurement]) -> Option<String> {
    const HEIGHT: f64 = 200.0;
    const LABELS: f64 = 190.0;
    let mut strategies: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| row.threads > 1) {
        if !strategies.contains(&row.strategy.as_str()) {
            strategies.push(&row.strategy);
        }
    }
    let series: Vec<Vec<&Measurement>> = strategies
        .iter()
        .map(|strategy| {
            let mut series: Vec<_> =
                rows.iter().filter(|row| row.strategy == **strategy).copied().collect();
            // The last row with one thread is the one of the series.
            series.reverse();
            series.sort_by_key(|row| row.threads);
            series.dedup_by_key(|row| row.threads);
            series
        })
        .filter(|series| series.len() > 1)
        .collect();
    let most = series.iter().flatten().map(|row| row.threads).max()?;
    let across = Scale { low: 0.0, high: (most as f64).log10(), width: WIDTH };
    let up = Scale::over(series.iter().flatten().map(|row| row.median), HEIGHT);
    let (width, height) = (WIDTH + LABELS, HEIGHT + 40.0);
    let mut svg = format!(
        r#"<svg role="img" aria-label="medians by threads" width="{width}" height="{height}" viewBox="-40 -10 {width} {height}">"#
    );
    let y = |value: f64| HEIGHT - up.position(value);
    for tick in up.ticks() {
        let y = y(tick);
        let _ = write!(
            svg,
            r#"<line class="tick" x1="0" y1="{y:.1}" x2="{WIDTH}" y2="{y:.1}"/><text x="-6" y="{:.1}" text-anchor="end">{tick}</text>"#,
            y + 4.0
        );
    }
    let mut counts: Vec<usize> = series.iter().flatten().map(|row| row.threads).collect();
    counts.sort_unstable();
    counts.dedup();
    for count in counts {
        let x = across.position(count as f64);
        let _ = write!(
            svg,
            r#"<text x="{x:.1}" y="{}" text-anchor="middle">{count}</text>"#,
            HEIGHT + 18.0
        );
    }
    // Labels that would overlap move down.
    let mut taken: Vec<f64> = Vec::new();
    for series in &series {
        let points: Vec<String> = series
            .iter()
            .map(|row| format!("{:.1},{:.1}", across.position(row.threads as f64), y(row.median)))
            .collect();
        let last = series[series.len() - 1];
        let class = last.side().class();
        let mut label = y(last.median) + 4.0;
        while taken.iter().any(|other| (other - label).abs() < 12.0) {
            label += 3.0;
        }
        taken.push(label);
        let _ = write!(
            svg,
            r#"<polyline class="{class}" points="{}"/><text class="{class}" x="{}" y="{label:.1}">{}</text>"#,
            points.join(" "),
            WIDTH + 6.0,
            super::page::escaped(&last.strategy)
        );
    }
    svg.push_str("</svg>");
    Some(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_places_its_ends_inside_and_equal_factors_at_equal_distances() {
        let scale = Scale::over([1.0, 10.0, 100.0].into_iter(), 300.0);
        let [low, middle, high] = [1.0, 10.0, 100.0].map(|value| scale.position(value));
        assert!(low > 0.0 && high < 300.0);
        assert!(((middle - low) - (high - middle)).abs() < 1e-9);
        assert_eq!(scale.ticks().collect::<Vec<_>>(), [1.0, 10.0, 100.0]);
    }

    #[test]
    fn a_scale_without_positive_values_is_finite() {
        let scale = Scale::over([0.0, f64::NAN].into_iter(), 300.0);
        assert!(scale.position(0.0).is_finite() && scale.position(f64::NAN).is_finite());
    }
}
