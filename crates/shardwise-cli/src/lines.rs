//! Files of lines that the user wrote.

use std::io::Read;
use std::path::Path;

use candle_core::{Device, Tensor};
use shardwise::error::ErrorKind;
use shardwise::prelude::*;
use shardwise::read_file::read_bytes;

/// The text of a file of at most so many bytes; `-` is standard input.
pub(crate) fn read(path: &Path, most: u64) -> Result<String> {
    let bad = |found: String| -> Error {
        let (found, needed) = (format!("{}: {found}", path.display()), format!("UTF-8 text of at most {most} bytes"));
        ErrorKind::path(path).error("file", found, needed, "check the path and the contents of the file")
    };
    let read = match path == Path::new("-") {
        true => {
            let mut bytes = Vec::new();
            std::io::stdin().take(most + 1).read_to_end(&mut bytes).map(|_| bytes)
        }
        false => read_bytes(path, most),
    };
    let bytes = read.map_err(|error| bad(error.to_string()))?;
    if bytes.len() as u64 > most {
        return Err(bad("more bytes than that".into()));
    }
    String::from_utf8(bytes).map_err(|error| bad(error.to_string()))
}

/// The text of the first rank, on all ranks; nothing if it has none. Collective.
pub(crate) fn broadcast(world: &World, text: Option<&str>) -> Result<Option<String>> {
    let first = world.rank() == 0;
    // -1 stands for none.
    let length = text.map_or(-1, |text| text.len() as i64);
    let length = first.then(|| Tensor::new(length, &Device::Cpu)).transpose()?;
    let length = world.broadcast(length.as_ref(), &TensorMeta::new((), DType::I64), 0)?.to_scalar::<i64>()?;
    let Ok(length) = usize::try_from(length) else { return Ok(None) };
    let bytes = text.filter(|_| first).map(|text| Tensor::new(text.as_bytes(), &Device::Cpu)).transpose()?;
    let bytes = world.broadcast(bytes.as_ref(), &TensorMeta::new(length, DType::U8), 0)?.to_vec1::<u8>()?;
    String::from_utf8(bytes).map(Some).map_err(Error::other)
}
