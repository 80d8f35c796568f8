//! Text and tokens: tokenizers and chat templates of model directories.
//!
//! Local: nothing here communicates. Files are data of somebody else: their sizes are bounded, nothing in them is executed but
//! chat templates, whose steps, memory and nesting are bounded too, and what is wrong with them is an error that names the file.
//!
//! ```
//! use shardwise::text::Tokenizer;
//!
//! let tokenizer = Tokenizer::bytes();
//! let ids = tokenizer.encode("déjà vu")?;
//! let mut stream = tokenizer.stream(&[]);
//! // A piece of text as soon as its characters are complete.
//! let pieces = ids.iter().map(|&id| stream.push(id)).collect::<Result<Vec<_>, _>>()?;
//! assert_eq!((pieces[1].as_str(), pieces[2].as_str()), ("", "é"));
//! assert_eq!(pieces.concat(), "déjà vu");
//! # Ok::<(), shardwise::Error>(())
//! ```
//!
//! * [`Tokenizer`]: `tokenizer.json` of a model directory, with its special tokens and its chat template.
//! * [`TextStream`]: text of tokens that come one by one.
//! * [`ChatTemplate`] and [`Message`]: a conversation as the text that a model was trained on.
//! * [`TextFiles`]: the files of a model directory that concern text; other formats build one from what they store.

mod chat;
mod files;
mod growth;
mod jinja;
mod special;
mod strftime;
mod stream;
mod tokenizer;
mod written;

pub use chat::{ChatOptions, ChatTemplate, Message};
pub use files::TextFiles;
pub use special::SpecialTokens;
pub use stream::TextStream;
pub use tokenizer::{EncodedPair, Tokenizer, catches_panics};
