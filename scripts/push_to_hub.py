"""Put a model on the Hub: weights, code, processor and card together, in one commit, after checking them.

    python scripts/push_to_hub.py me/traffic-vlm --dry-run     # what would go up, and what the checks say
    python scripts/push_to_hub.py me/traffic-vlm
    python scripts/push_to_hub.py me/my-streets --model runs/mine --private --revision try-2

Log in with `hf auth login`, or set HF_TOKEN. A model folder may have a README.md and LICENSE of its own; otherwise
those of this repository go up. Checked is that every class of `auto_map` loads in a fresh process and the model
answers about a blank image, that the code imports only what its users have, that the card's metadata are valid, and
that the weights are safetensors.
"""

import argparse
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Put a model on the Hub.")
    parser.add_argument("repo", help="name on the Hub: user/name, or a name in your own account")
    parser.add_argument("--model", type=Path, default=ROOT, help="model folder (default: this repository)")
    parser.add_argument("--dry-run", action="store_true", help="list and check, but upload nothing")
    parser.add_argument("--output", type=Path, help="an empty or new folder: keep here what goes up")
    parser.add_argument("--private", action="store_true", help="make the repository private; refuse a public one")
    parser.add_argument("--revision", help="branch to push to, made if need be (default: main)")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    # Imported here, as it takes seconds: what is wrong with the command is said at once.
    from traffic_vlm.publishing.hub import publish

    try:
        address = publish(
            arguments.model,
            arguments.repo,
            arguments.dry_run,
            output=arguments.output,
            report=lambda line: print(line, flush=True),
            private=arguments.private or None,
            revision=arguments.revision,
        )
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"pushed: {address}" if address else "dry run: nothing was uploaded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
