//! A text column of a Parquet file.

use std::fs::File;
use std::path::{Path, PathBuf};

use parquet::basic::Type as PhysicalType;
use parquet::column::reader::ColumnReader;
use parquet::data_type::ByteArray;
use parquet::file::reader::{FileReader, SerializedFileReader};

use crate::error::{Error, ErrorKind, Result, listed};

/// Texts that are decoded at a time.
const BATCH: usize = 256;

/// The texts of a column, row group after row group. Rows without a text are left out.
pub(super) struct ParquetTexts {
    reader: SerializedFileReader<File>,
    path: PathBuf,
    column: usize,
    /// The largest definition level: that of a value that is there.
    defined: i16,
    /// The row groups that have been opened.
    groups: usize,
    open: Option<ColumnReader>,
    /// Decoded texts, the next one last.
    decoded: Vec<String>,
    bytes: u64,
    size: u64,
}

impl ParquetTexts {
    pub(super) fn open(file: File, path: &Path, name: &str) -> Result<Self> {
        let size = file.metadata()?.len();
        let reader = SerializedFileReader::new(file).map_err(|error| bad(path, &error))?;
        let schema = reader.metadata().file_metadata().schema_descr_ptr();
        let columns = schema.columns();
        let is_text = |column: &usize| columns[*column].path().string() == name;
        let Some(column) = (0..columns.len()).find(is_text) else {
            let known = listed(columns.iter().map(|column| format!("`{}`", column.path().string())));
            return Err(bad(path, &format!("no column `{name}` among {known}")));
        };
        let described = &columns[column];
        if described.physical_type() != PhysicalType::BYTE_ARRAY || described.max_rep_level() > 0 {
            return Err(bad(path, &format!("column `{name}` is {}, not text", described.physical_type())));
        }
        let (path, defined) = (path.to_path_buf(), described.max_def_level());
        Ok(ParquetTexts { reader, path, column, defined, groups: 0, open: None, decoded: Vec::new(), bytes: 0, size })
    }

    /// The next text, and about how many bytes of the file have been read.
    pub(super) fn next_text(&mut self) -> Result<Option<(String, u64)>> {
        loop {
            if let Some(text) = self.decoded.pop() {
                return Ok(Some((text, self.bytes)));
            }
            let Some(ColumnReader::ByteArrayColumnReader(open)) = &mut self.open else {
                let groups = self.reader.num_row_groups();
                if self.groups == groups {
                    return Ok(None);
                }
                let group = self.reader.get_row_group(self.groups).map_err(|error| bad(&self.path, &error))?;
                self.open = Some(group.get_column_reader(self.column).map_err(|error| bad(&self.path, &error))?);
                self.groups += 1;
                // Other columns are not read, so the share of the row groups is what is known about the progress.
                self.bytes = self.size / groups as u64 * self.groups as u64;
                continue;
            };
            let (mut levels, mut values): (Vec<i16>, Vec<ByteArray>) = (Vec::new(), Vec::new());
            let has_levels = (self.defined > 0).then_some(&mut levels);
            let (records, _, _) =
                open.read_records(BATCH, has_levels, None, &mut values).map_err(|error| bad(&self.path, &error))?;
            if records == 0 {
                self.open = None;
                continue;
            }
            for value in values.iter().rev() {
                let text = std::str::from_utf8(value.data()).map_err(|error| bad(&self.path, &error))?;
                self.decoded.push(text.to_string());
            }
        }
    }
}

fn bad(path: &Path, found: &dyn std::fmt::Display) -> Error {
    let found = format!("{}: {found}", path.display());
    ErrorKind::Data.error(
        "data",
        found,
        "a Parquet file with a column of texts",
        "check the file and the name of the column",
    )
}
