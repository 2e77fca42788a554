"""The site as people see it: built by Sphinx, served, and opened in a headless Chromium.

Needs the extras `docs` and `site-test`, and Debian's packages chromium and chromium-driver.
Screenshots are kept in ``out/site``.
"""

import functools
import http.server
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading

from absl.testing import absltest, parameterized

ROOT = pathlib.Path(__file__).parents[2]
SHOTS = ROOT / "out" / "site"
PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))
NEEDS = ("sphinx", "myst_parser", "furo", "sphinx_copybutton", "selenium")
MISSING = [*(name for name in NEEDS if importlib.util.find_spec(name) is None),
           *(name for name in ("chromium", "chromedriver") if shutil.which(name) is None)]
PHONE = (390, 844)

if not MISSING:
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait


class _Quiet(http.server.SimpleHTTPRequestHandler):

    def log_message(self, *arguments):
        pass


@absltest.skipIf(MISSING, f"not installed: {', '.join(MISSING)} (see make test-site)")
class SiteTest(parameterized.TestCase):

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = pathlib.Path(cls.enter_context(tempfile.TemporaryDirectory()))
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet",
             str(ROOT / "docs"), str(folder)], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": path})
        if done.returncode:
            raise AssertionError(done.stderr[-5000:])
        cls.folder = folder
        server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cls.addClassCleanup(server.shutdown)
        cls.address = f"http://127.0.0.1:{server.server_port}/"
        options = webdriver.ChromeOptions()
        for option in ("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run",
                       "disable-background-networking", "disable-component-update",
                       "disable-sync",
                       f"user-data-dir={cls.enter_context(tempfile.TemporaryDirectory())}"):
            options.add_argument(f"--{option}")
        options.binary_location = shutil.which("chromium")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        cls.browser = webdriver.Chrome(
            options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        cls.addClassCleanup(cls.browser.quit)
        SHOTS.mkdir(parents=True, exist_ok=True)

    def open(self, page, size=(1280, 900), scheme="light"):
        """Opens a page as a device of that size shows it, in light or dark mode."""
        # Chromium's window has a least width, which a phone's is below.
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False})
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {
            "features": [{"name": "prefers-color-scheme", "value": scheme}]})
        self.browser.get(self.address + page)
        return self.browser

    def shoot(self, name):
        self.browser.save_screenshot(str(SHOTS / f"{name}.png"))

    @parameterized.parameters(*PAGES)
    def test_page_renders(self, page):
        """Lost otherwise: a page, its pictures, or what its scripts do."""
        browser = self.open(f"{page}.html")
        self.assertNotEmpty(browser.find_element(By.TAG_NAME, "h1").text)
        for picture in browser.find_elements(By.CSS_SELECTOR, "article img"):
            self.assertGreater(picture.get_property("naturalWidth"), 0,
                               picture.get_attribute("src"))
        wrong = [entry for entry in browser.get_log("browser")
                 if entry["level"] in ("SEVERE", "ERROR") and "favicon" not in entry["message"]]
        self.assertEmpty(wrong)
        self.shoot(page)

    @parameterized.parameters(*PAGES)
    def test_fits_a_phone(self, page):
        """Lost otherwise: readers on a phone, who would have to scroll each line sideways."""
        browser = self.open(f"{page}.html", PHONE)
        width = browser.execute_script("return document.documentElement.scrollWidth")
        self.assertLessEqual(width, PHONE[0])
        self.shoot(f"{page}_phone")

    @parameterized.parameters("index", "api", "merge_device")
    def test_dark_mode(self, page):
        """Lost otherwise: readers at night, before a white page or black letters on black."""
        def brightness(css):
            color = browser.find_element(By.CSS_SELECTOR, "article p").value_of_css_property(css)
            return sum(map(float, color[color.index("(") + 1:-1].split(",")[:3])) / (3 * 255)

        for scheme in ("light", "dark"):
            browser = self.open(f"{page}.html", scheme=scheme)
            ground = browser.execute_script(
                "return getComputedStyle(document.body).backgroundColor")
            light = sum(map(float, ground[ground.index("(") + 1:-1].split(",")[:3])) / (3 * 255)
            self.assertGreater(abs(light - brightness("color")), 0.5, scheme)
            self.assertEqual(light > 0.5, scheme == "light")
            self.shoot(f"{page}_{scheme}")

    def test_search_finds_merge_device(self):
        """Lost otherwise: the one argument that people look for, in a search that finds nothing."""
        browser = self.open("search.html?q=merge_device")
        results = WebDriverWait(browser, 30).until(
            lambda _: browser.find_elements(By.CSS_SELECTOR, "#search-results li a"))
        WebDriverWait(browser, 30).until(lambda _: any(
            "merge_device" in link.get_attribute("href")
            for link in browser.find_elements(By.CSS_SELECTOR, "#search-results li a")))
        self.assertNotEmpty(results)
        self.shoot("search")

    def test_code_can_be_copied(self):
        """Lost otherwise: a click, and prompts of a doctest in what was copied."""
        browser = self.open("api.html")
        block = browser.find_element(By.CSS_SELECTOR, "div.highlight")
        self.assertStartsWith(block.text, ">>> strategy = TowerStrategy(split_cpu(4))")
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", block)
        button = block.find_element(By.CSS_SELECTOR, "button.copybtn")
        hands = webdriver.ActionChains(browser)
        hands.move_to_element(block).move_to_element(button).click().perform()
        WebDriverWait(browser, 10).until(lambda _: "success" in button.get_attribute("class"))
        browser.execute_script("document.querySelector('article').innerHTML = '<textarea/>'")
        field = browser.find_element(By.TAG_NAME, "textarea")
        field.send_keys(Keys.CONTROL, "v")
        copied = field.get_property("value")
        self.assertStartsWith(copied, "strategy = TowerStrategy(split_cpu(4))")
        self.assertNotIn(">>>", copied)

    def test_every_link_leads_somewhere(self):
        """Lost otherwise: a reader who follows a link to a page or a section that is not there."""
        done = subprocess.run([sys.executable, str(ROOT / "docs" / "links.py"), str(self.folder)],
                              capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout.strip()), (0, ""))

    def test_each_version_has_its_own_site(self):
        """Lost otherwise: readers of an older release, before the documents of another one."""
        clone = self.enter_context(tempfile.TemporaryDirectory())
        number = pathlib.Path(clone, "towerstrategy", "_version.py")

        def run(*command):
            done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stderr[-5000:])

        run("git", "clone", "--quiet", str(ROOT), ".")
        number.write_text(f'{number.read_text()}\n__version__ = "0.0.1"\n')
        run("git", "-c", "user.name=a", "-c", "user.email=a", "commit", "--quiet", "-am", "Older")
        run("git", "tag", "v0.0.1")
        run("git", "reset", "--quiet", "--hard", "HEAD~")
        run("make", "-o", f"{sys.prefix}/docs.installed", f"VENV={sys.prefix}", "docs-versions")
        for name, other in (("main", "v0.0.1"), ("v0.0.1", "main")):
            text = pathlib.Path(clone, "build", "sites", name, "quickstart.html").read_text()
            self.assertIn(f'href="../{other}/index.html"', text)
            self.assertEqual("TowerStrategy 0.0.1" in text, name == "v0.0.1")

    @parameterized.parameters("gone.html", "index.html#gone")
    def test_a_broken_link_is_found(self, link):
        """Lost otherwise: the test above, which would pass whatever it is given."""
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        (folder / "index.html").write_text(f'<p id="here"><a href="#here"/><a href="{link}"/></p>')
        done = subprocess.run([sys.executable, str(ROOT / "docs" / "links.py"), str(folder)],
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(len(done.stdout.splitlines()), 1)
        self.assertIn(link, done.stdout)


if __name__ == "__main__":
    absltest.main()
