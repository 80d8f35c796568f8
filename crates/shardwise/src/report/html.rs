//! The page: data and the scripts that draw it, in one file.

use serde::{Deserialize, Serialize};

use super::RunReport;
use crate::comm::RankDump;
use crate::error::{Error, ErrorKind, Result};

/// What a page shows.
#[derive(Serialize)]
struct PageData<'a> {
    runs: &'a [RunReport],
    failures: &'a [RankDump],
}

/// As [`PageData`], read from a page.
#[derive(Deserialize)]
struct StoredPage {
    runs: Vec<RunReport>,
    failures: Vec<RankDump>,
}

const STYLE: &str = include_str!("page/report.css");

/// In this order: a later file uses functions of those before it.
const SCRIPTS: [&str; 9] = [
    include_str!("page/elements.js"),
    include_str!("page/layouts.js"),
    include_str!("page/modules.js"),
    include_str!("page/step.js"),
    include_str!("page/timeline.js"),
    include_str!("page/memory.js"),
    include_str!("page/traffic.js"),
    include_str!("page/failures.js"),
    include_str!("page/main.js"),
];

/// What comes before the data in a page.
const BEFORE_DATA: &str = "<script type=\"application/json\" id=\"data\">";

/// Renders runs, which the page compares if there are two, and [dumps](RankDump) of failed ranks as one HTML file that needs no network.
pub fn page(runs: &[RunReport], failures: &[RankDump]) -> String {
    let title = runs.first().map_or("failed run", |run| run.title.as_str());
    // No tag can begin inside the data: `<` is written as an escape.
    let data = serde_json::to_string(&PageData { runs, failures }).expect("numbers and texts");
    let (title, data) = (title.replace('&', "&amp;").replace('<', "&lt;"), data.replace('<', "\\u003c"));
    let script = SCRIPTS.concat();
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title} - Shardwise</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<main id=\"main\"></main>\n\
         {BEFORE_DATA}{data}</script>\n<script>\n\"use strict\";\n{script}</script>\n</body>\n</html>\n"
    )
}

/// Reads the runs and dumps of a [`page`].
///
/// # Errors
/// [`Error::Invalid`] if the text is not such a page.
pub fn read_page(text: &str) -> Result<(Vec<RunReport>, Vec<RankDump>)> {
    let data = text.split_once(BEFORE_DATA).and_then(|(_, rest)| rest.split_once("</script>"));
    let Some((data, _)) = data else {
        let fix = "name a page that `shardwise report`, `train --report` or `plan --html` wrote";
        return Err(ErrorKind::Data.error("report", "a page without data", "a page of Shardwise", fix));
    };
    let StoredPage { runs, failures } = serde_json::from_str(data).map_err(Error::other)?;
    Ok((runs, failures))
}
