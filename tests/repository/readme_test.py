"""What the documents say: their code runs, their links lead somewhere."""

import os
import pathlib
import re
import runpy
import subprocess
import sys
import tempfile

import code_blocks
import pytest
from absl.testing import absltest, parameterized

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTS = [str(path.relative_to(ROOT))
             for path in [ROOT / "README.md", ROOT / "BUILD.md", *sorted(ROOT.glob("docs/*.md"))]]
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def outcome() -> subprocess.CompletedProcess[str]:
    """All documents' blocks, run in one process from an empty folder."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as empty:
        return subprocess.run(
            [sys.executable, str(ROOT / "tests" / "repository" / "code_blocks.py"),
             *(str(ROOT / name) for name in DOCUMENTS)],
            cwd=empty, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": path})


class DocumentsTest(parameterized.TestCase):

    @pytest.mark.wide
    def test_code_runs(self):
        """Else what a user copies from the documents fails."""
        done = outcome()
        for document in DOCUMENTS:
            with self.subTest(document):
                count = len(code_blocks.blocks((ROOT / document).read_text()))
                self.assertIn(f"{document}: ran {count} blocks", done.stdout, done.stderr)

    @parameterized.parameters(DOCUMENTS)
    def test_links_lead_to_files(self, document):
        """Else a reader who follows a link stands before nothing."""
        for target in LINK.findall((ROOT / document).read_text()):
            if "://" not in target:
                self.assertTrue((ROOT / document).parent.joinpath(target).exists(), target)

    @pytest.mark.wide
    def test_picture_can_be_drawn_again(self):
        """Else the picture of a step cannot follow when the step changes."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "step.png")
            runpy.run_path(str(ROOT / "docs" / "pictures" / "step.py"))["draw"](str(path))
            self.assertEqual(path.read_bytes()[:4], b"\x89PNG")

    def test_printed_output_is_compared(self):
        """Else a document shows tables of last year, and who follows it believes in a mistake."""
        block = "```python\nprint('a table')\nprint(3)\n```\n\n{}\n\n{}\n\nMore.\n"
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "page.md")
            for said, lines in (("It prints:", "    a table\n    3"), ("It prints, last:", "    3"),
                                ("It\nprints:", "    a ...\n    3"), ("", "    3"),
                                ("Not so.\n\nElsewhere:", "    4")):
                path.write_text(block.format(said, lines))
                self.assertEqual(code_blocks.run(path), 1)
            for lines in ("    4", "    a table\n\n    3", "    a table", "    table\n    3"):
                path.write_text(block.format("It prints:", lines))
                with self.assertRaisesRegex(AssertionError, r"(?s)md:1: .*but prints\na table"):
                    code_blocks.run(path)

    @parameterized.parameters(
        ("examples/same_as_one_device.py", r"(\w+Strategy) +differs .* by (\S+)"),
        ("examples/two_machines.py", r"(loss) (\S+), accuracy (\S+)"))
    @pytest.mark.wide
    def test_scripts_print_what_the_readme_says(self, script, pattern):
        """Else the first numbers that a reader compares with his own are those of last year."""
        done = subprocess.run([sys.executable, str(ROOT / script)], capture_output=True, text=True,
                              check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        said, found = ({name: numbers for name, *numbers in re.findall(pattern, text)}
                       for text in ((ROOT / "README.md").read_text(), done.stdout))
        self.assertEqual(list(said), list(found))
        for name in said:
            for one, other in zip(said[name], found[name]):
                # Rounding has no number of its own; all else is the same everywhere.
                self.assertAlmostEqual(float(one), float(other), delta=1e-6 + 1e-2 * float(one))

    @parameterized.parameters("README.md", "docs/merge_device.md")
    def test_documents_say_what_is_printed(self, document):
        """Else the comparison has nothing to compare."""
        self.assertTrue(any(code_blocks.outputs((ROOT / document).read_text())))

    def test_readme_has_the_examples_that_it_promises(self):
        """Else the test above passes with nothing to run."""
        self.assertGreaterEqual(len(code_blocks.blocks((ROOT / "README.md").read_text())), 3)


if __name__ == "__main__":
    absltest.main()
