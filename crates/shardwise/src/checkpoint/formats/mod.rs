//! The registry of formats: one line per built-in format, and those registered at run time.

pub(in crate::checkpoint) mod dcp;
pub mod gguf;
pub(in crate::checkpoint) mod pickle;
pub(in crate::checkpoint) mod torch;
pub(in crate::checkpoint) mod zip;
pub(in crate::checkpoint) mod hf;
pub(in crate::checkpoint) mod native;
pub(in crate::checkpoint) mod safetensors;
pub(in crate::checkpoint) mod weight_index;

use std::any::Any;
use std::str::FromStr;

use parking_lot::RwLock;
use serde::{Deserialize, Deserializer, de};

use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::catalogs::format::{CheckpointFormat, Format, FormatWriter};

use crate::error::{Error, ErrorKind, Result};

macro_rules! formats {
    ($($name:ident $format:expr, $doc:literal;)*) => {
        #[allow(non_upper_case_globals)] // they read as variants: Format::Native
        impl Format {
            $(#[doc = $doc] pub const $name: Format = Format(&$format);)*
        }

        /// In the order in which `detect` is tried.
        const BUILT_IN: &[Format] = &[$(Format::$name),*];
    };
}

formats! {
    Native native::Native, "Shardwise's own format: safetensors files, and a manifest with checksums of every block.";
    Dcp dcp::Dcp, "PyTorch's distributed checkpoint (DCP): `.metadata` and `.distcp` files.";
    HuggingFace hf::HuggingFace, "Hugging Face safetensors: one file, several with an index, or one per rank. Holds tensors only.";
    Gguf gguf::Gguf, "A GGUF file of llama.cpp, or several that it was split into, quantized or not. Read only.";
    Torch torch::Torch, "A `torch.save` file, or several with `pytorch_model.bin.index.json`. Read only.";
}

/// Custom formats, in the order of registration.
static REGISTERED: RwLock<Vec<Format>> = RwLock::new(Vec::new());

impl Format {
    /// Registers a custom format with this process: [`open`](crate::checkpoint::open) recognizes it, and its name parses as a [`Format`].
    ///
    /// Custom formats are tried before the built-in ones, in the order of registration. Every process must register before it
    /// opens or saves. Registering the same type again returns the first registration, so every rank of a launch may do it.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if another format has this name or alias.
    pub fn register(format: &'static dyn CheckpointFormat) -> Result<Format> {
        let mut registered = REGISTERED.write();
        let same = |known: &&Format| {
            let (known, new): (&dyn Any, &dyn Any) = (known.0, format);
            (*known).type_id() == (*new).type_id()
        };
        if let Some(known) = registered.iter().find(|known| known.name() == format.name()).filter(same) {
            return Ok(*known);
        }
        let names = || std::iter::once(format.name()).chain(format.aliases().iter().copied());
        for known in registered.iter().chain(BUILT_IN) {
            if let Some(taken) = names().find(|name| is_called(*known, name)) {
                let found = format!("the name {taken:?}, which format {known} has");
                return Err(ErrorKind::Argument.error(
                    "checkpoint format",
                    found,
                    "a name that no other format has",
                    "rename the new format",
                ));
            }
        }
        registered.push(Format(format));
        Ok(Format(format))
    }

    /// Returns all formats in the order in which they are tried when a checkpoint is opened.
    pub fn all() -> Vec<Format> {
        REGISTERED.read().iter().chain(BUILT_IN).copied().collect()
    }

    /// The format's writer; an error for a read-only format.
    pub(in crate::checkpoint) fn to_write(self) -> Result<&'static dyn FormatWriter> {
        self.0.writer().ok_or_else(|| {
            let found = format!("{self}, which is only read ({})", self.about());
            let names: Vec<&str> = Format::all().into_iter().filter(|f| f.is_writable()).map(Format::name).collect();
            ErrorKind::Unsupported.error(
                "checkpoint format",
                found,
                "one that can be written",
                format!("use {}", names.join(", ")),
            )
        })
    }

    /// The first format that recognizes these files.
    pub(in crate::checkpoint) fn detect(files: &Files) -> Option<Format> {
        Format::all().into_iter().find(|format| format.0.detect(files))
    }

    /// Whether any format writes files of this name.
    pub(in crate::checkpoint) fn any_owns(name: &str) -> bool {
        Format::all().into_iter().any(|format| format.owns(name))
    }
}

fn is_called(format: Format, name: &str) -> bool {
    format.name() == name || format.aliases().contains(&name)
}

impl FromStr for Format {
    type Err = Error;

    /// Parses a name or alias, ignoring case.
    fn from_str(text: &str) -> Result<Self> {
        let (all, name) = (Format::all(), text.to_lowercase());
        all.iter().copied().find(|format| is_called(*format, &name)).ok_or_else(|| {
            let known: Vec<&str> = all.iter().map(|format| format.name()).collect();
            let fix = "use one of these, or register the format first";
            ErrorKind::unknown(text).error(
                "checkpoint format",
                format!("{text:?}"),
                format!("one of {}", known.join(", ")),
                fix,
            )
        })
    }
}

impl<'de> Deserialize<'de> for Format {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::metadata::stored::Contents;

    struct TestFormat(&'static str);

    impl CheckpointFormat for TestFormat {
        fn name(&self) -> &'static str {
            self.0
        }

        fn about(&self) -> &'static str {
            "a format of this test"
        }

        fn detect(&self, _: &Files) -> bool {
            false
        }

        fn open(&self, _: &Files) -> Result<Contents> {
            Ok(Contents::default())
        }

        fn owns(&self, _: &str) -> bool {
            false
        }
    }

    #[test]
    fn names_are_unique_and_errors_list_the_known_ones() {
        for taken in ["native", "hf", "dcp"] {
            let error = Format::register(Box::leak(Box::new(TestFormat(taken)))).unwrap_err().to_string();
            assert!(error.contains(taken), "{error}");
        }
        static FIRST: TestFormat = TestFormat("mine");
        let mine = Format::register(&FIRST).unwrap();
        assert_eq!(Format::register(&FIRST).unwrap(), mine);
        assert_eq!(Format::all()[0], mine);
        assert_eq!(("HF".parse::<Format>().unwrap(), "Mine".parse::<Format>().unwrap()), (Format::HuggingFace, mine));
        let error = "zarr".parse::<Format>().unwrap_err().to_string();
        assert!(error.contains("mine, native, dcp, hugging-face, gguf, torch"), "{error}");
        let error = mine.to_write().err().unwrap().to_string();
        assert!(error.contains("mine, which is only read") && error.contains("native, dcp, hugging-face"), "{error}");
        assert_eq!(format!("{:?} {:?} {mine:?}", Format::HuggingFace, Format::Native), "HuggingFace Native Mine");
        let text = serde_json::to_string(&Format::HuggingFace).unwrap();
        assert_eq!(
            (text.as_str(), serde_json::from_str::<Format>(&text).unwrap()),
            ("\"hugging-face\"", Format::HuggingFace)
        );
    }
}
