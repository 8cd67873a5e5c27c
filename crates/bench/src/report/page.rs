//! The page of a report: one HTML file without scripts and without anything to load.
//!
//! Rows that a rival wins come first. The machine, the rows that were left out, each table with its
//! charts, and the figures of the documents behind afresh follow.

use std::fmt::Write;

use super::published::{PUBLISHED, PublishedTable};
use super::{Measurement, Report, Side, TableResult, chart};

/// A rival wins where it needs less than this share of our best time; closer rows are equal within
/// the noise.
const WIN: f64 = 0.97;

/// Beginning of a message with the version of a rival.
const VERSION: &str = "version: ";

const STYLE: &str = "
:root{color-scheme:light dark;--fg:#1c2024;--dim:#60646c;--bg:#fff;--line:#d9d9e0;--ours:#0b7a75;--rival:#b3541e;--floor:#8b8d98}
@media(prefers-color-scheme:dark){:root{--fg:#edeef0;--dim:#b0b4ba;--bg:#111113;--line:#363a3f;--ours:#3dd6c4;--rival:#ffa057;--floor:#777b84}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);max-width:68rem;margin:2rem auto;padding:0 1rem}
h1{margin-bottom:0}h2{margin-top:2.5rem;border-bottom:1px solid var(--line)}h3{margin:1.5rem 0 .3rem}
p.dim,td.dim,caption{color:var(--dim)}code{font-size:13px}
table{border-collapse:collapse;margin:.3rem 0}td,th{padding:0 .9rem 0 0;text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td:first-child,th:first-child{text-align:left}th{font-weight:600}caption{text-align:left;caption-side:bottom}
tr.ours td:first-child{color:var(--ours);font-weight:600}b.ours{color:var(--ours)}b.rival{color:var(--rival)}b.floor{color:var(--floor)}tr.rival td:first-child{color:var(--rival)}tr.floor td:first-child{color:var(--floor)}
div.scroll{overflow-x:auto}.warning{border:1px solid var(--rival);padding:.5rem 1rem}
svg{vertical-align:middle}svg text{font:12px system-ui,sans-serif;fill:var(--dim)}svg .tick{stroke:var(--line)}
svg line.ours,svg polyline.ours{stroke:var(--ours)}svg line.rival,svg polyline.rival{stroke:var(--rival)}svg line.floor,svg polyline.floor{stroke:var(--floor)}
svg line{stroke-width:2}svg line.tick{stroke-width:1}svg polyline{fill:none;stroke-width:2}
svg circle.ours,svg text.ours{fill:var(--ours)}svg circle.rival,svg text.rival{fill:var(--rival)}svg circle.floor,svg text.floor{fill:var(--floor)}
nav a{margin-right:1rem}a{color:inherit}
";

/// Text for HTML.
pub(super) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            char => escaped.push(char),
        }
    }
    escaped
}

/// A figure with four significant digits.
fn figure(value: f64) -> String {
    if !value.is_finite() {
        return "–".to_owned();
    }
    let digits = match value.abs() {
        0.0 => 0,
        v if v >= 1000.0 => 0,
        v if v >= 100.0 => 1,
        v if v >= 10.0 => 2,
        v if v >= 1.0 => 3,
        _ => 4,
    };
    format!("{value:.digits$}")
}

/// The whole page.
pub(super) fn html(report: &Report) -> String {
    let mut page = String::new();
    // Writing to a string cannot fail.
    let _ = write_page(&mut page, report);
    page
}

fn write_page(page: &mut String, report: &Report) -> std::fmt::Result {
    write!(
        page,
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>afresh: benchmark report</title><style>{STYLE}</style><h1>afresh: benchmark report</h1>\
         <p class=\"dim\">{}, {:.0} s, {} run</p>",
        date(report.started),
        report.seconds,
        if report.quick { "rough" } else { "full" }
    )?;
    if !report.machine.is_optimised {
        page.push_str(
            "<p class=\"warning\">The program was built without optimisation. These figures say nothing about \
             afresh.</p>",
        );
    }
    page.push_str("<nav>");
    for table in &report.tables {
        write!(page, "<a href=\"#{0}\">{0}</a>", escaped(&table.name))?;
    }
    page.push_str("<a href=\"#published\">published figures</a></nav>");
    write_wins(page, report)?;
    page.push_str("<h2>Machine</h2><table>");
    for (name, value) in report.machine.lines() {
        write!(page, "<tr><td>{name}<td style=\"text-align:left\">{}", escaped(&value))?;
    }
    page.push_str(
        "</table><p>The contestants of a case take turns within one run, so that drift of the machine affects all \
         of them equally. Figures are medians over rounds. In the charts a dot is the median and the line reaches \
         from the minimum to the 99th percentile, on a logarithmic scale. Colours: <b class=\"ours\">afresh</b>, \
         <b class=\"rival\">rivals</b>, and <b class=\"floor\">floors</b>, which are the work without a reset. \
         <code>afresh-bench compare</code> decides \
         whether two reports differ. All rounds are in <a href=\"report.json\">report.json</a>.",
    );
    write_omissions(page, report)?;
    for table in &report.tables {
        write_table(page, table)?;
    }
    page.push_str(
        "<h2 id=\"published\">Published figures</h2><p>Each document used a machine of its own: compare ratios within \
         a table, not figures across tables.",
    );
    for published in &PUBLISHED {
        write_published(page, published, report)?;
    }
    page.push_str("</html>\n");
    Ok(())
}

/// The rows of one case and number of threads that measure time.
fn contests(report: &Report) -> Vec<Vec<&Measurement>> {
    let mut contests: Vec<Vec<&Measurement>> = Vec::new();
    for row in report.rows().filter(|row| row.is_time()) {
        let same = contests.iter_mut().find(|rows| {
            let first = rows[0];
            (&first.table, &first.case, first.threads) == (&row.table, &row.case, row.threads)
        });
        match same {
            Some(rows) => rows.push(row),
            None => contests.push(vec![row]),
        }
    }
    contests
}

/// The row of a side with the smallest median.
fn best<'a>(rows: &[&'a Measurement], side: Side) -> Option<&'a Measurement> {
    let rows = rows.iter().copied().filter(|row| row.side() == side);
    rows.min_by(|one, other| one.median.total_cmp(&other.median))
}

/// The contests that a rival wins, with each rival that is faster.
fn write_wins(page: &mut String, report: &Report) -> std::fmt::Result {
    let contests: Vec<_> = contests(report)
        .into_iter()
        .filter_map(|rows| Some((best(&rows, Side::Afresh)?, best(&rows, Side::Rival)?, rows)))
        .collect();
    let is_faster = |rival: &Measurement, ours: &Measurement| rival.median < ours.median * WIN;
    let lost: Vec<_> = contests.iter().filter(|(ours, rival, _)| is_faster(rival, ours)).collect();
    write!(
        page,
        "<h2>Where a rival wins</h2><p>A rival is faster than the best strategy of afresh in {} of {} contests.",
        lost.len(),
        contests.len()
    )?;
    if lost.is_empty() {
        return Ok(());
    }
    page.push_str(
        "<div class=\"scroll\"><table><tr><th>case<th>rival<th>time<th>afresh<th>time<th>ratio",
    );
    let pairs = lost.into_iter().flat_map(|(ours, _, rows)| {
        let rivals = rows.iter().filter(|row| row.side() == Side::Rival);
        rivals.filter(|rival| is_faster(rival, ours)).map(move |rival| (*ours, *rival))
    });
    for (ours, rival) in pairs {
        let threads = match ours.threads {
            0 | 1 => String::new(),
            threads => format!(", {threads} threads"),
        };
        write!(
            page,
            "<tr><td>{} {}{threads}<td>{}<td>{} {unit}<td>{}<td>{} {unit}<td>{:.2}x",
            escaped(&ours.table),
            escaped(&ours.case),
            escaped(&rival.strategy),
            figure(rival.median),
            escaped(&ours.strategy),
            figure(ours.median),
            ours.median / rival.median,
            unit = escaped(&ours.unit),
        )?;
    }
    page.push_str("</table></div>");
    Ok(())
}

/// Tables that failed, and messages about rows that were left out.
fn write_omissions(page: &mut String, report: &Report) -> std::fmt::Result {
    let omissions: Vec<(&str, &str)> = report
        .tables
        .iter()
        .flat_map(|table| {
            let failure = table.error.iter();
            let notes = table.notes.iter().filter(|note| note.contains("left out"));
            failure.chain(notes).map(|text| (table.name.as_str(), text.as_str()))
        })
        .collect();
    if omissions.is_empty() {
        return Ok(());
    }
    page.push_str("<h2>Left out</h2><table>");
    for (table, reason) in omissions {
        write!(
            page,
            "<tr><td>{}<td style=\"text-align:left;white-space:normal\">{}",
            escaped(table),
            escaped(reason)
        )?;
    }
    page.push_str("</table>");
    Ok(())
}

/// All cases of a table.
fn write_table(page: &mut String, table: &TableResult) -> std::fmt::Result {
    write!(
        page,
        "<h2 id=\"{0}\">{0}</h2><p class=\"dim\"><code>{1}</code>, {2:.0} s",
        escaped(&table.name),
        escaped(&table.command),
        table.seconds
    )?;
    for note in &table.notes {
        if let Some(version) = note.strip_prefix(VERSION) {
            write!(page, ", {}", escaped(version))?;
        }
    }
    let mut cases: Vec<&str> = Vec::new();
    for row in &table.rows {
        if !cases.contains(&row.case.as_str()) {
            cases.push(&row.case);
        }
    }
    for case in cases {
        let rows: Vec<&Measurement> = table.rows.iter().filter(|row| row.case == case).collect();
        let mut alone: Vec<&Measurement> = Vec::new();
        for row in rows.iter().copied().filter(|row| row.threads == rows[0].threads) {
            // A strategy that is also measured with several threads has a second row with one.
            if !alone
                .iter()
                .any(|other| (&other.strategy, &other.unit) == (&row.strategy, &row.unit))
            {
                alone.push(row);
            }
        }
        write!(page, "<h3>{}</h3>", escaped(case))?;
        write_rows(page, table, &alone)?;
        if let Some(chart) = chart::threads(&rows) {
            write!(page, "<p class=\"dim\">Medians by threads</p>{chart}")?;
        }
    }
    Ok(())
}

/// The rows of one case as a table with a chart in its last column.
fn write_rows(page: &mut String, table: &TableResult, rows: &[&Measurement]) -> std::fmt::Result {
    // Times and counts have separate scales.
    let mut units: Vec<&str> = Vec::new();
    for row in rows {
        if !units.contains(&row.unit.as_str()) {
            units.push(&row.unit);
        }
    }
    for unit in units {
        let rows: Vec<&Measurement> = rows.iter().copied().filter(|row| row.unit == unit).collect();
        let ours = best(&rows, Side::Afresh).filter(|row| row.is_time()).map(|row| row.median);
        let charts = chart::dots(&rows);
        write!(
            page,
            "<div class=\"scroll\"><table><tr><th>strategy<th>median, {0}<th>min<th>p99<th>to afresh<th>",
            escaped(unit)
        )?;
        for (row, chart) in rows.iter().zip(charts) {
            let class = row.side().class();
            let ratio = ours.map_or_else(String::new, |ours| format!("{:.2}x", row.median / ours));
            write!(
                page,
                "<tr class=\"{class}\" title=\"{command} --filter '{filter}'\"><td>{}<td>{}<td>{}<td>{}<td>{ratio}\
                 <td>{chart}",
                escaped(&row.strategy),
                figure(row.median),
                figure(row.min),
                figure(row.p99),
                command = escaped(&table.command),
                filter = escaped(&format!("{} {}", row.case, row.strategy)),
            )?;
        }
        page.push_str("</table></div>");
    }
    Ok(())
}

/// A table of a document, and our rows for the same question.
fn write_published(
    page: &mut String,
    published: &PublishedTable,
    report: &Report,
) -> std::fmt::Result {
    let PublishedTable { source, title, unit, columns, rows, ours } = published;
    write!(page, "<h3>{}, {unit}</h3><div class=\"scroll\"><table><tr><th>", escaped(title))?;
    for column in *columns {
        write!(page, "<th>{}", escaped(column))?;
    }
    for (name, figures) in *rows {
        write!(page, "<tr><td>{}", escaped(name))?;
        for value in *figures {
            write!(page, "<td>{}", figure(*value))?;
        }
    }
    write!(page, "<caption>{}</caption></table></div>", escaped(source))?;
    for (table, case, strategies) in *ours {
        let found: Vec<String> = strategies
            .iter()
            .filter_map(|strategy| {
                let row = report.rows().find(|row| {
                    (row.table.as_str(), row.case.as_str(), row.strategy.as_str(), row.threads)
                        == (*table, *case, *strategy, 1)
                })?;
                Some(format!("{strategy} {} {}", figure(row.median), row.unit))
            })
            .collect();
        if found.is_empty() {
            write!(page, "<p class=\"dim\">This run did not measure <code>{table} {case}</code>.")?;
        } else {
            write!(
                page,
                "<p>This run, <code>{table} {case}</code>: {}.",
                escaped(&found.join(", "))
            )?;
        }
    }
    Ok(())
}

/// The day of a moment in seconds since 1970, in UTC, by the algorithm of Howard Hinnant's
/// “chrono-Compatible Low-Level Date Algorithms”.
fn date(seconds: u64) -> String {
    let days = i64::try_from(seconds / 86_400).unwrap_or_default() + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0), "1970-01-01");
        assert_eq!(date(951_782_400), "2000-02-29");
        assert_eq!(date(1_798_761_599), "2026-12-31");
    }

    #[test]
    fn a_page_names_lost_contests_and_reasons_and_escapes_what_it_shows() {
        let row = |strategy: &str, median: f64| {
            let row = serde_json::json!({
                "table": "wasm", "case": "<case>", "strategy": strategy, "threads": 1, "median": median,
                "min": median, "p99": median, "unit": "us",
            });
            serde_json::from_value::<Measurement>(row).unwrap()
        };
        let table = TableResult {
            name: "wasm".to_owned(),
            rows: vec![
                row("reset", 2.0),
                row("wasmtime/on-demand", 1.0),
                row("native", 0.2),
                row("none", 0.5),
            ],
            notes: ["node left out: <missing>", "a remark", "version: gVisor 1"]
                .map(str::to_owned)
                .into(),
            ..TableResult::default()
        };
        let report = Report { tables: vec![table], ..Report::default() };
        let page = html(&report);
        let wins = page.find("in 1 of 1 contests").expect("the lost contest is on the page");
        assert!(wins < page.find("<h2>Machine").unwrap(), "{page}");
        // Each rival that is faster has a row, and a floor has none.
        let wins = &page[wins..page.find("<h2>Machine").unwrap()];
        assert!(wins.contains("<td>2.00x") && wins.contains("<td>10.00x"), "{wins}");
        assert!(wins.contains("native") && !wins.contains("none"), "{wins}");
        assert!(page.contains("0 s, gVisor 1"), "{page}");
        assert!(page.contains("node left out: &lt;missing&gt;") && !page.contains("a remark"));
        assert!(!page.contains("<case>"));
        assert!(!page.contains("http"), "the page loads something");
    }
}
